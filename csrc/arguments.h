// The checks of bindings.cpp: dtype, device, shape, density, non-null memory. What they let pass is
// what an op may rely on.
//
// The texts follow one pattern: `op: expected <argument> <what>, got <value>`.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <string>

#include "ops.h"
#include "tensor.h"

namespace syncbn {

namespace py = pybind11;

constexpr int64_t kOneValue = -1;  // as a size: a tensor of shape [], as num_batches_tracked

// ---- names for messages

inline std::string dtype_name(const DLDataType& t) {
  const char* kind = t.code == kDLFloat     ? "float"
                     : t.code == kDLBfloat  ? "bfloat"
                     : t.code == kDLInt     ? "int"
                     : t.code == kDLUInt    ? "uint"
                     : t.code == kDLComplex ? "complex"
                     : t.code == kDLBool    ? "bool"
                                            : "other";
  return t.code == kDLBool ? kind : kind + std::to_string(t.bits);
}

inline std::string device_name(const DLDevice& d) {
  switch (d.device_type) {
    case kDLCPU:
      return "cpu";
    case kDLCUDA:
      return "cuda:" + std::to_string(d.device_id);
    default:
      return "device type " + std::to_string(static_cast<int>(d.device_type));
  }
}

inline std::string shape_name(const Tensor& t) {
  std::string text = "[";
  for (int i = 0; i < t.dl.ndim; ++i) text += (i ? ", " : "") + std::to_string(t.dl.shape[i]);
  return text + "]";
}

// ---- checks

inline std::optional<DType> floating(const DLDataType& t) {
  if (t.lanes != 1) return std::nullopt;
  if (t.code == kDLFloat && t.bits == 32) return DType::float32;
  if (t.code == kDLFloat && t.bits == 16) return DType::float16;
  if (t.code == kDLBfloat && t.bits == 16) return DType::bfloat16;
  if (t.code == kDLFloat && t.bits == 64) return DType::float64;
  return std::nullopt;
}

inline DLDataType accumulator(DType dtype) {
  return {kDLFloat, static_cast<uint8_t>(dtype == DType::float64 ? 64 : 32), 1};
}

struct Running {
  Vector mean;
  Vector var;
  int64_t* num_batches_tracked;
};

// The checks of one call: `op` names it, the first tensor sets the device and the channels.
class Arguments {
 public:
  Arguments(const char* op, const char* name, const Tensor& x) : op_(op), x_(x), x_name_(name) {
    if (!x.elsewhere.empty()) {
      type_error(std::string(name) + " on a CPU or CUDA device", x.elsewhere);
    }
    present(name, x);
    if (!x.is_cpu() && !x.is_cuda()) {
      type_error(std::string(name) + " on a CPU or CUDA device", device_name(x.dl.device));
    }
#ifndef SYNCBN_WITH_CUDA
    if (x.is_cuda()) {
      throw std::runtime_error(
          std::string(op) + ": " + name + " is on " + device_name(x.dl.device) +
          ", but this syncbn was built without CUDA kernels; build it where nvcc and a CUDA build "
          "of PyTorch are: SYNCBN_CUDA=1 python -m pip install --no-build-isolation "
          "--force-reinstall --no-deps syncbn");
    }
#endif
    dtype_ = dtype_of(name, x);
    if (x.dl.ndim < 2) {
      value_error(std::string(name) + " with at least 2 dimensions", std::to_string(x.dl.ndim));
    }
    if (x.dl.shape[1] >= int64_t{1} << 31) {
      value_error(std::string(name) + " with fewer than 2^31 channels",
                  std::to_string(x.dl.shape[1]));
    }
    dense_ = dense_layout(x.dl.ndim, x.dl.shape, x.dl.strides, &layout_);
    if (!dense_) layout_ = {0, x.dl.shape[1], 1};
    not_null(name, x);
  }

  DType dtype() const { return dtype_; }
  const Layout& layout() const {
    if (!dense_) {
      value_error(std::string(x_name_) + " without gaps or overlaps in memory", "a strided view");
    }
    return layout_;
  }
  int64_t sums_size() const { return 2 * layout_.channels + 1; }

  // [N, C, ...] of the shape, dtype, device and strides of the first tensor.
  void* like_first(const char* name, const Tensor& t) const {
    present(name, t);
    same_device(name, t);
    if (dtype_of(name, t) != dtype_) {
      type_error(std::string(name) + " of dtype " + dtype_name(x_.dl.dtype) + ", as " + x_name_,
                 dtype_name(t.dl.dtype));
    }
    bool same_shape = t.dl.ndim == x_.dl.ndim;
    for (int i = 0; same_shape && i < t.dl.ndim; ++i) same_shape = t.dl.shape[i] == x_.dl.shape[i];
    if (!same_shape) {
      value_error(std::string(name) + " of shape " + shape_name(x_) + ", as " + x_name_,
                  shape_name(t));
    }
    if (!same_strides(t.dl.ndim, t.dl.shape, t.dl.strides, x_.dl.strides)) {
      value_error(std::string(name) + " with the strides of " + x_name_, "others");
    }
    not_null(name, t);
    return t.data();
  }

  // [size] float64.
  double* doubles(const char* name, const Tensor& t, int64_t size) const {
    return static_cast<double*>(contiguous(name, t, size, {kDLFloat, 64, 1}));
  }

  // [2C] in the accumulation type.
  void* accumulators(const char* name, const Tensor& t) const {
    return contiguous(name, t, 2 * layout_.channels, accumulator(dtype_));
  }

  bool dense() const { return dense_; }

  // Whether a [C] in any of the four dtypes, or None, has no gaps in memory.
  bool gapless(const char* name, const Tensor& t) const {
    if (absent(name, t)) return true;
    dtype_of(name, t);
    return fits(name, t, layout_.channels, t.dl.dtype);
  }

  // [C] in any of the four dtypes, or None.
  Vector vector(const char* name, const Tensor& t) const {
    if (absent(name, t)) return {nullptr, DType::float32};
    const DType dtype = dtype_of(name, t);
    return {contiguous(name, t, layout_.channels, t.dl.dtype), dtype};
  }

  // The running statistics: [C], both or neither, and [] int64 or None.
  Running running(const Tensor& mean, const Tensor& var, const Tensor& num_batches_tracked,
                  bool has_momentum) const {
    if (absent("running_mean", mean) != absent("running_var", var)) {
      value_error("running_mean and running_var both or neither", "one");
    }
    Running running{vector("running_mean", mean), vector("running_var", var), nullptr};
    if (!absent("num_batches_tracked", num_batches_tracked)) {
      running.num_batches_tracked = static_cast<int64_t*>(
          contiguous("num_batches_tracked", num_batches_tracked, kOneValue, {kDLInt, 64, 1}));
    } else if (mean.defined && !has_momentum) {
      value_error("num_batches_tracked for momentum=None", "None");
    }
    return running;
  }

  double number(const char* name, const py::object& value) const {
    const double number = PyFloat_AsDouble(value.ptr());
    if (number == -1 && PyErr_Occurred()) {
      PyErr_Clear();
      type_error(std::string(name) + " to be a number", Py_TYPE(value.ptr())->tp_name);
    }
    return number;
  }
  void not_negative(const char* name, const py::object& value) const {
    if (!(number(name, value) >= 0)) {
      value_error(std::string(name) + " of 0 or more", py::str(value));
    }
  }

  // Bytes on the device of the first tensor; needed by CUDA ops alone.
  Workspace workspace(const Tensor& t) const {
    if (!x_.is_cuda()) return {nullptr, 0};
    present("workspace", t);
    same_device("workspace", t);
    if (t.dl.ndim != 1 || t.dl.dtype.bits != 8) {
      value_error("workspace of bytes with 1 dimension",
                  dtype_name(t.dl.dtype) + " of shape " + shape_name(t));
    }
    not_null("workspace", t);
    if ((t.size() > 1 && t.dl.strides[0] != 1) || !t.is_aligned()) {
      value_error("workspace contiguous and aligned to 16 bytes", "another view");
    }
    return {t.data(), static_cast<size_t>(t.size())};
  }

 private:
  [[noreturn]] void value_error(const std::string& expected, const std::string& got) const {
    throw py::value_error(std::string(op_) + ": expected " + expected + ", got " + got);
  }
  [[noreturn]] void type_error(const std::string& expected, const std::string& got) const {
    throw py::type_error(std::string(op_) + ": expected " + expected + ", got " + got);
  }

  [[noreturn]] void wrong_device(const char* name, const std::string& got) const {
    value_error(std::string(name) + " on " + device_name(x_.dl.device) + ", as " + x_name_, got);
  }

  bool absent(const char* name, const Tensor& t) const {
    if (!t.foreign.empty()) {
      type_error(std::string(name) + " to be a plain torch.Tensor", t.foreign);
    }
    if (!t.elsewhere.empty()) wrong_device(name, t.elsewhere);
    return !t.defined;
  }
  void present(const char* name, const Tensor& t) const {
    if (absent(name, t)) type_error(std::string(name) + " to be a tensor", "None");
  }
  void not_null(const char* name, const Tensor& t) const {
    if (t.data() == nullptr && t.size() != 0) {
      value_error(std::string(name) + " with memory behind it", "a null pointer");
    }
  }
  void same_device(const char* name, const Tensor& t) const {
    const bool same = t.dl.device.device_type == x_.dl.device.device_type
                          ? t.dl.device.device_id == x_.dl.device.device_id
                          : t.is_cpu() && x_.is_cpu();  // pinned memory is CPU memory
    if (!same) wrong_device(name, device_name(t.dl.device));
  }
  DType dtype_of(const char* name, const Tensor& t) const {
    if (auto dtype = floating(t.dl.dtype)) return *dtype;
    type_error(std::string(name) + " of dtype float32, float16, bfloat16 or float64",
               dtype_name(t.dl.dtype));
  }
  // Checks all but the stride of a tensor of shape [size], or [] for kOneValue; returns whether
  // that is 1.
  bool fits(const char* name, const Tensor& t, int64_t size, const DLDataType& dtype) const {
    present(name, t);
    same_device(name, t);
    if (t.dl.dtype.code != dtype.code || t.dl.dtype.bits != dtype.bits) {
      type_error(std::string(name) + " of dtype " + dtype_name(dtype), dtype_name(t.dl.dtype));
    }
    const bool fits = size == kOneValue ? t.size() == 1 : t.dl.ndim == 1 && t.dl.shape[0] == size;
    if (!fits) {
      value_error(std::string(name) + " of shape [" +
                      (size == kOneValue ? std::string() : std::to_string(size)) + "]",
                  shape_name(t));
    }
    not_null(name, t);
    return size <= 1 || t.dl.strides[0] == 1;
  }
  void* contiguous(const char* name, const Tensor& t, int64_t size, const DLDataType& dtype) const {
    if (!fits(name, t, size, dtype))
      value_error(std::string(name) + " contiguous", "a strided view");
    return t.data();
  }

  const char* op_;
  const Tensor& x_;
  const char* x_name_;
  DType dtype_;
  bool dense_;
  Layout layout_;
};

}  // namespace syncbn

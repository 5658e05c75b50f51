// The extension module syncbn._C: names and docstrings, argument checks, the switch between CPU and
// CUDA.
//
// Whatever reaches an op has been checked here: dtype, device, shape, density, non-null memory. The
// texts follow one pattern: `op: expected <argument> <what>, got <value>`.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "cpu/scratch.h"
#include "ops.h"
#include "tensor.h"
#ifdef SYNCBN_WITH_CUDA
#include <cuda_runtime_api.h>

#include "cuda/workspace.h"
#endif

namespace py = pybind11;

namespace syncbn {
namespace {

#ifdef SYNCBN_WITH_CUDA
constexpr size_t kWorkspaceBytes = cuda::workspace_bytes();
#else
constexpr size_t kWorkspaceBytes = 0;
#endif
constexpr int64_t kOneValue = -1;  // as a size: a tensor of shape [], as num_batches_tracked

// ---- names for messages

std::string dtype_name(const DLDataType& t) {
  const char* kind = t.code == kDLFloat    ? "float"
                     : t.code == kDLBfloat ? "bfloat"
                     : t.code == kDLInt    ? "int"
                     : t.code == kDLUInt   ? "uint"
                     : t.code == kDLBool   ? "bool"
                                           : "other";
  return t.code == kDLBool ? kind : kind + std::to_string(t.bits);
}

std::string device_name(const DLDevice& d) {
  switch (d.device_type) {
    case kDLCPU:
      return "cpu";
    case kDLCUDA:
      return "cuda:" + std::to_string(d.device_id);
    default:
      return "device type " + std::to_string(static_cast<int>(d.device_type));
  }
}

std::string shape_name(const Tensor& t) {
  std::string text = "[";
  for (int i = 0; i < t.dl.ndim; ++i) text += (i ? ", " : "") + std::to_string(t.dl.shape[i]);
  return text + "]";
}

// ---- checks

std::optional<DType> floating(const DLDataType& t) {
  if (t.lanes != 1) return std::nullopt;
  if (t.code == kDLFloat && t.bits == 32) return DType::float32;
  if (t.code == kDLFloat && t.bits == 16) return DType::float16;
  if (t.code == kDLBfloat && t.bits == 16) return DType::bfloat16;
  if (t.code == kDLFloat && t.bits == 64) return DType::float64;
  return std::nullopt;
}

DLDataType accumulator(DType dtype) {
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
          "of PyTorch "
          "are: SYNCBN_CUDA=1 pip install --no-build-isolation --force-reinstall --no-deps syncbn");
    }
#endif
    dtype_ = dtype_of(name, x);
    if (x.dl.ndim < 2) {
      value_error(std::string(name) + " with at least 2 dimensions", std::to_string(x.dl.ndim));
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

  // Bytes on the device of the first tensor; needed by CUDA ops alone.
  Workspace workspace(const Tensor& t) const {
    if (!x_.is_cuda()) return {nullptr, 0};
    present("workspace", t);
    same_device("workspace", t);
    if (t.dl.ndim != 1 || t.dl.dtype.bits != 8) {
      value_error("workspace of bytes with 1 dimension",
                  dtype_name(t.dl.dtype) + " of shape " + shape_name(t));
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

// ---- CPU or CUDA

PyObject* torch_get_num_threads = nullptr;  // set at import, lives as long as the interpreter

int num_threads() {
  py::object threads =
      py::reinterpret_steal<py::object>(PyObject_CallNoArgs(torch_get_num_threads));
  if (!threads) throw py::error_already_set();
  return threads.cast<int>();
}

// Elements below which the CPU is done before other threads could be asked, for help or to go on.
constexpr int64_t kSmall = 4096;

template <typename Op>
using Implementation = void (*)(const Op&, const Execution&);

template <typename Op>
void run(const Tensor& x, const Op& op, Implementation<Op> cpu, Implementation<Op> cuda) {
  if (x.is_cuda()) {
    const Execution where{1, x.dl.device.device_id, x.stream()};
    py::gil_scoped_release_simple released;
    cuda(op, where);
  } else if (op.layout.size() < kSmall) {
    cpu(op, {1, 0, nullptr});
  } else {
    const Execution where{num_threads(), 0, nullptr};
    py::gil_scoped_release_simple released;
    cpu(op, where);
  }
}

#ifdef SYNCBN_WITH_CUDA
#define SYNCBN_RUN(name, x, op) run<decltype(op)>(x, op, cpu::name, cuda::name)
#else
#define SYNCBN_RUN(name, x, op) run<decltype(op)>(x, op, cpu::name, nullptr)
#endif

// ---- the ops

void statistics(const Tensor& x, const Tensor& sums, const Tensor& workspace) {
  Arguments check("statistics", "x", x);
  Statistics op{check.dtype(), check.layout(), x.data(),
                check.doubles("sums", sums, check.sums_size()), check.workspace(workspace)};
  SYNCBN_RUN(statistics, x, op);
}

void normalize(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& sums,
               const Tensor& running_mean, const Tensor& running_var,
               const Tensor& num_batches_tracked, const Tensor& y, const Tensor& moments,
               std::optional<double> momentum, double eps) {
  Arguments check("normalize", "x", x);
  const Running running =
      check.running(running_mean, running_var, num_batches_tracked, momentum.has_value());
  Normalize op{check.dtype(),
               check.layout(),
               x.data(),
               check.vector("weight", weight),
               check.vector("bias", bias),
               check.doubles("sums", sums, check.sums_size()),
               running.mean,
               running.var,
               running.num_batches_tracked,
               check.like_first("y", y),
               check.doubles("moments", moments, check.sums_size()),
               momentum.value_or(0),
               !momentum.has_value(),
               eps};
  SYNCBN_RUN(normalize, x, op);
}

void backward_reduce(const Tensor& dy, const Tensor& x, const Tensor& moments,
                     const Tensor& sums_dy, const Tensor& dweight, const Tensor& dbias,
                     const Tensor& workspace) {
  Arguments check("backward_reduce", "x", x);
  BackwardReduce op{check.dtype(),
                    check.layout(),
                    check.like_first("dy", dy),
                    x.data(),
                    check.doubles("moments", moments, check.sums_size()),
                    check.accumulators("sums_dy", sums_dy),
                    check.vector("dweight", dweight),
                    check.vector("dbias", dbias),
                    check.workspace(workspace)};
  SYNCBN_RUN(backward_reduce, x, op);
}

void backward_input(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& moments,
                    const Tensor& sums_dy, const Tensor& dx) {
  Arguments check("backward_input", "x", x);
  BackwardInput op{check.dtype(),
                   check.layout(),
                   check.like_first("dy", dy),
                   x.data(),
                   check.vector("weight", weight),
                   check.doubles("moments", moments, check.sums_size()),
                   check.accumulators("sums_dy", sums_dy),
                   check.like_first("dx", dx)};
  SYNCBN_RUN(backward_input, x, op);
}

// ---- both ops of one direction, for a participant that is alone: nothing happens between them

void forward(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& sums,
             const Tensor& running_mean, const Tensor& running_var,
             const Tensor& num_batches_tracked, const Tensor& y, const Tensor& moments,
             std::optional<double> momentum, double eps, const Tensor& workspace) {
  statistics(x, sums, workspace);
  normalize(x, weight, bias, sums, running_mean, running_var, num_batches_tracked, y, moments,
            momentum, eps);
}

void backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& moments,
              const Tensor& sums_dy, const Tensor& dweight, const Tensor& dbias, const Tensor& dx,
              const Tensor& workspace) {
  if (!sums_dy.defined && x.is_cpu()) {
    // The CPU is done with them when this returns.
    const Arguments checked("backward", "x", x);
    int64_t size = 2 * checked.layout().channels, stride = 1;
    cpu::Scratch<double> memory(size);
    Tensor scratch;
    scratch.defined = true;
    scratch.dl = {memory.data(), x.dl.device, 1, accumulator(checked.dtype()), &size, &stride, 0};
    return backward(dy, x, weight, moments, scratch, dweight, dbias, dx, workspace);
  }
  backward_reduce(dy, x, moments, sums_dy, dweight, dbias, workspace);
  if (dx.defined) backward_input(dy, x, weight, moments, sums_dy, dx);
}

bool check(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& running_mean,
           const Tensor& running_var, const Tensor& num_batches_tracked,
           std::optional<double> momentum) {
  Arguments check("batchnorm2d_sync", "x", x);
  const bool gapless = check.gapless("weight", weight) & check.gapless("bias", bias);
  check.running(running_mean, running_var, num_batches_tracked, momentum.has_value());
  return check.dense() && gapless;
}

bool same_layout(const Tensor& a, const Tensor& b) {
  return a.dl.ndim == b.dl.ndim && same_strides(a.dl.ndim, a.dl.shape, a.dl.strides, b.dl.strides);
}

// The device, stream and graph capture (0 for none) that an op on x would be launched in.
py::tuple launch_context(const Tensor& x) {
#ifdef SYNCBN_WITH_CUDA
  Arguments check("launch_context", "x", x);
  if (x.is_cuda()) {
    void* stream = x.stream();
    const int device = x.dl.device.device_id;
    return py::make_tuple(device, reinterpret_cast<uintptr_t>(stream),
                          cuda::capture_id(device, stream));
  }
#endif
  throw py::value_error("launch_context: expected x on a CUDA device, got " +
                        device_name(x.dl.device));
}

py::dict build_info() {
  py::dict info;
  info["version"] = SYNCBN_VERSION;
#ifdef __clang__
  info["compiler"] = __VERSION__;
#else
  info["compiler"] = "GCC " __VERSION__;
#endif
#ifdef SYNCBN_WITH_CUDA
  info["cuda"] =
      std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
  info["cuda_archs"] = SYNCBN_CUDA_ARCHS;
#else
  info["cuda"] = py::none();
  info["cuda_archs"] = "";
#endif
  return info;
}

}  // namespace
}  // namespace syncbn

PYBIND11_MODULE(_C, m) {
  using namespace syncbn;
  // Both look-ups happen here, under the import lock, so that no op has to take a lock while it
  // holds the GIL.
  exchange_api(Py_TYPE(Py_None));
  torch_get_num_threads =
      py::object(py::module_::import("torch").attr("get_num_threads")).release().ptr();

  m.doc() =
      "Kernels of syncbn. Outputs are passed in; csrc/ops.h says what each op computes. "
      "Tensors [N, C, ...] are dense; sums and moments are float64 [2C + 1].";
  m.def("statistics", &statistics, py::arg("x"), py::arg("sums"), py::arg("workspace") = py::none(),
        "sums = [sum of x | sum of x^2 | n] per channel.");
  m.def("normalize", &normalize, py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("sums"),
        py::arg("running_mean"), py::arg("running_var"), py::arg("num_batches_tracked"),
        py::arg("y"), py::arg("moments"), py::arg("momentum"), py::arg("eps"),
        "y, moments = [mean | invstd | n] and the running statistics, from reduced sums.");
  m.def(
      "backward_reduce", &backward_reduce, py::arg("dy"), py::arg("x"), py::arg("moments"),
      py::arg("sums_dy"), py::arg("dweight"), py::arg("dbias"), py::arg("workspace") = py::none(),
      "sums_dy = [sum of dy | sum of dy * xhat] per channel; dweight and dbias are the same sums.");
  m.def("backward_input", &backward_input, py::arg("dy"), py::arg("x"), py::arg("weight"),
        py::arg("moments"), py::arg("sums_dy"), py::arg("dx"), "dx, from reduced sums_dy.");
  m.def("forward", &forward, py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("sums"),
        py::arg("running_mean"), py::arg("running_var"), py::arg("num_batches_tracked"),
        py::arg("y"), py::arg("moments"), py::arg("momentum"), py::arg("eps"),
        py::arg("workspace") = py::none(), "statistics and normalize.");
  m.def("backward", &backward, py::arg("dy"), py::arg("x"), py::arg("weight"), py::arg("moments"),
        py::arg("sums_dy"), py::arg("dweight"), py::arg("dbias"), py::arg("dx"),
        py::arg("workspace") = py::none(),
        "backward_reduce and, if there is a dx, backward_input. On the CPU sums_dy may be None.");
  m.def("check", &check, py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("running_mean"),
        py::arg("running_var"), py::arg("num_batches_tracked"), py::arg("momentum"),
        "Raises what the four ops would raise for these arguments. Returns whether x, weight and "
        "bias have no gaps in memory, in any order of dimensions; if not, they have to be copied.");
  m.def("same_layout", &same_layout, py::arg("a"), py::arg("b"),
        "Whether two tensors of one shape place every element at the same offset.");
  m.def("launch_context", &launch_context, py::arg("x"),
        "(device, stream, graph capture or 0) of an op on x, which is on a CUDA device.");
  m.attr("WORKSPACE_BYTES") = kWorkspaceBytes;
  m.def("build_info", &build_info,
        "version, compiler, CUDA version (None for a CPU-only build) and architectures of this "
        "build.");
}

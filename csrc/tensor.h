// The one door to tensors: a pybind11 type caster over DLPack's C exchange API.
//
// type(t).__dlpack_c_exchange_api__ (PyTorch >= 2.10) is a table of C functions. Two of them are
// used: one fills a DLTensor that borrows the tensor's memory, shape and strides, without a
// reference count and without stream synchronization; one tells the current stream. So the
// extension needs no PyTorch library and no C++ ABI of PyTorch's, and one binary serves every
// PyTorch >= 2.10.
#pragma once

#include <ATen/dlpack.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "ops.h"

namespace syncbn {

// A borrowed view, valid while the Python tensor is: the length of a call. Not `defined` for None,
// and for what cannot be read: what it is is then in `foreign`, or its device in `elsewhere`.
struct Tensor {
  DLTensor dl{};
  const DLPackExchangeAPI* api = nullptr;
  bool defined = false;
  std::string foreign;
  std::string elsewhere;

  int64_t size() const {
    int64_t size = 1;
    for (int i = 0; i < dl.ndim; ++i) size *= dl.shape[i];
    return size;
  }
  void* data() const { return static_cast<char*>(dl.data) + dl.byte_offset; }
  bool is_aligned() const { return reinterpret_cast<uintptr_t>(data()) % 16 == 0; }
  bool is_cuda() const { return dl.device.device_type == kDLCUDA; }
  bool is_cpu() const {
    return dl.device.device_type == kDLCPU || dl.device.device_type == kDLCUDAHost;
  }
  // The caller's current stream on the tensor's device.
  void* stream() const {
    void* stream = nullptr;
    if (api->current_work_stream(dl.device.device_type, dl.device.device_id, &stream) != 0) {
      throw pybind11::error_already_set();
    }
    return stream;
  }
};

// The exchange table of a tensor type, or null for a type that is none of ours to read: not a
// tensor, or a tensor subclass with a __torch_dispatch__ (DTensor, FakeTensor, ...), whose data
// pointer, if it has one, is not the tensor's value.
inline const DLPackExchangeAPI* exchange_api(PyTypeObject* type) {
  namespace py = pybind11;
  // The two types of nearly every call, looked up once. Subclasses are rare enough to look up each
  // time.
  struct Known {
    PyTypeObject* tensor;
    PyTypeObject* parameter;
    const DLPackExchangeAPI* api;
  };
  static const Known known = [] {
    py::module_ torch = py::module_::import("torch");
    py::object tensor = torch.attr("Tensor");
    py::object parameter = torch.attr("nn").attr("Parameter");
    py::object capsule = tensor.attr("__dlpack_c_exchange_api__");
    auto* api = static_cast<const DLPackExchangeAPI*>(
        PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api == nullptr) throw py::error_already_set();
    if (api->header.version.major != DLPACK_MAJOR_VERSION) {
      throw py::import_error("this PyTorch speaks DLPack " +
                             std::to_string(api->header.version.major) + ", syncbn was built for " +
                             std::to_string(DLPACK_MAJOR_VERSION));
    }
    // Both live as long as the interpreter: static destructors run after it.
    return Known{reinterpret_cast<PyTypeObject*>(tensor.release().ptr()),
                 reinterpret_cast<PyTypeObject*>(parameter.release().ptr()), api};
  }();
  if (type == known.tensor || type == known.parameter) return known.api;
  if (!PyType_IsSubtype(type, known.tensor)) return nullptr;
  py::handle base(reinterpret_cast<PyObject*>(known.tensor));
  py::handle derived(reinterpret_cast<PyObject*>(type));
  const bool plain = derived.attr("__torch_dispatch__").is(base.attr("__torch_dispatch__"));
  return plain ? known.api : nullptr;
}

}  // namespace syncbn

namespace pybind11::detail {

template <>
struct type_caster<syncbn::Tensor> {
  PYBIND11_TYPE_CASTER(syncbn::Tensor, const_name("torch.Tensor | None"));

  bool load(handle source, bool) {
    if (source.is_none()) return true;
    value.api = syncbn::exchange_api(Py_TYPE(source.ptr()));
    if (value.api == nullptr) {
      value.foreign = Py_TYPE(source.ptr())->tp_name;
      return true;
    }
    if (value.api->dltensor_from_py_object_no_sync(source.ptr(), &value.dl) != 0) {
      PyErr_Clear();  // says less than this does
      const std::string device = str(source.attr("device").attr("type"));
      if (device != "cpu" && device != "cuda") {
        value.elsewhere = str(source.attr("device"));
      } else if (source.attr("is_nested").cast<bool>()) {
        value.foreign = "a nested tensor";
      } else {
        value.foreign = str(source.attr("layout"));
        if (value.foreign == "torch.strided") value.foreign = str(source.attr("dtype"));
      }
      return true;
    }
    value.defined = true;
    return true;
  }
};

}  // namespace pybind11::detail

// The extension module syncbn._C: names and docstrings, and the switch between CPU and CUDA.
//
// Whatever reaches an op has passed the checks of arguments.h.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "arguments.h"
#include "cpu/scratch.h"
#include "ops.h"
#include "tensor.h"
#ifdef SYNCBN_WITH_CUDA
#include <cuda_runtime_api.h>

#include "cuda/workspace.h"
#endif

namespace syncbn {
namespace {

#ifdef SYNCBN_WITH_CUDA
constexpr size_t kWorkspaceBytes = cuda::workspace_bytes();
#else
constexpr size_t kWorkspaceBytes = 0;
#endif

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

// CUDA kernels read value by value what lies unlike the tensor beside it, and number what they read
// in 32 bits. So large tensors have to begin at a multiple of 16 bytes, as new ones do.
bool begins_well(const Tensor& t) {
  return !t.is_cuda() || t.is_aligned() || t.size() <= int64_t{1} << 30;
}

bool same_layout(const Tensor& a, const Tensor& b) {
  return a.dl.ndim == b.dl.ndim &&
         same_strides(a.dl.ndim, a.dl.shape, a.dl.strides, b.dl.strides) && begins_well(a);
}

// ---- both ops of one direction, for a participant that is alone: nothing happens between them

// A vector in memory that is no Python object.
struct View : Tensor {
  int64_t length;
  int64_t stride = 1;

  View(void* data, const Tensor& like, DLDataType dtype, int64_t size) : length(size) {
    dl = {data, like.dl.device, 1, dtype, &length, &stride, 0};
    defined = true;
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
};

// The moments, and on CUDA as many doubles of scratch memory behind them: an allocation less for
// each direction.
double* moments_and_scratch(const Arguments& check, const Tensor& x, const Tensor& moments) {
  return check.doubles("moments", moments, (x.is_cuda() ? 2 : 1) * check.sums_size());
}

void forward(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& running_mean,
             const Tensor& running_var, const Tensor& num_batches_tracked, const Tensor& y,
             const Tensor& moments, std::optional<double> momentum, double eps,
             const Tensor& workspace) {
  const Arguments check("forward", "x", x);
  const int64_t size = check.sums_size();
  const DLDataType float64{kDLFloat, 64, 1};
  double* memory = moments_and_scratch(check, x, moments);
  // On the CPU, whoever writes the moments of a channel has read its sums before.
  const View sums(x.is_cuda() ? memory + size : memory, x, float64, size);
  statistics(x, sums, workspace);
  normalize(x, weight, bias, sums, running_mean, running_var, num_batches_tracked, y,
            View(memory, x, float64, size), momentum, eps);
}

bool backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& moments,
              const Tensor& dweight, const Tensor& dbias, const Tensor& dx,
              const Tensor& workspace) {
  const Arguments check("backward", "x", x);
  if (!same_layout(dy, x)) return false;
  const int64_t size = check.sums_size();
  double* memory = moments_and_scratch(check, x, moments);
  cpu::Scratch<double> on_cpu(x.is_cuda() ? 0 : size);
  const View sums_dy(x.is_cuda() ? memory + size : on_cpu.data(), x, accumulator(check.dtype()),
                     size - 1);
  const View own(memory, x, {kDLFloat, 64, 1}, size);
  backward_reduce(dy, x, own, sums_dy, dweight, dbias, workspace);
  if (dx.defined) backward_input(dy, x, weight, own, sums_dy, dx);
  return true;
}

bool check(const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& running_mean,
           const Tensor& running_var, const Tensor& num_batches_tracked, const py::object& momentum,
           const py::object& eps) {
  Arguments check("batchnorm2d_sync", "x", x);
  const bool gapless = check.gapless("weight", weight) & check.gapless("bias", bias);
  check.running(running_mean, running_var, num_batches_tracked, !momentum.is_none());
  if (!momentum.is_none()) check.number("momentum", momentum);
  check.not_negative("eps", eps);
  return check.dense() && gapless && begins_well(x);
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
  m.def("forward", &forward, py::arg("x"), py::arg("weight"), py::arg("bias"),
        py::arg("running_mean"), py::arg("running_var"), py::arg("num_batches_tracked"),
        py::arg("y"), py::arg("moments"), py::arg("momentum"), py::arg("eps"),
        py::arg("workspace") = py::none(),
        "statistics and normalize. On CUDA the moments are followed by as much scratch memory: "
        "[2 * (2C + 1)].");
  m.def("backward", &backward, py::arg("dy"), py::arg("x"), py::arg("weight"), py::arg("moments"),
        py::arg("dweight"), py::arg("dbias"), py::arg("dx"), py::arg("workspace") = py::none(),
        "backward_reduce and, if there is a dx, backward_input, with the moments of forward. "
        "False, and nothing done, where the elements of dy do not lie where those of x do.");
  m.def("check", &check, py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("running_mean"),
        py::arg("running_var"), py::arg("num_batches_tracked"), py::arg("momentum"), py::arg("eps"),
        "Raises what the four ops would raise for these arguments. Returns whether x, weight and "
        "bias can be read where they are: without gaps in memory, in any order of dimensions; if "
        "not, they have to be copied.");
  m.def(
      "same_layout", &same_layout, py::arg("a"), py::arg("b"),
      "Whether two tensors of one shape place every element at the same offset, and a can be read "
      "where it is.");
  m.def("launch_context", &launch_context, py::arg("x"),
        "(device, stream, graph capture or 0) of an op on x, which is on a CUDA device.");
  m.attr("WORKSPACE_BYTES") = kWorkspaceBytes;
  m.def("build_info", &build_info,
        "version, compiler, CUDA version (None for a CPU-only build) and architectures of this "
        "build.");
}

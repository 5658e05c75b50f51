// What every launcher needs: device guard, error texts, template arguments from run-time facts, a
// plan for the device.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <initializer_list>
#include <mutex>
#include <stdexcept>
#include <string>

#include "reduce.cuh"
#include "workspace.h"

namespace syncbn::cuda {

// Says which code the current device lacks.
[[noreturn]] inline void no_code(const char* op) {
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  const std::string capability = std::to_string(major) + "." + std::to_string(minor);
  throw std::runtime_error(std::string(op) + ": cuda:" + std::to_string(device) +
                           " has compute capability " + capability +
                           ", but this syncbn has code for " SYNCBN_CUDA_ARCHS
                           " alone; build it for that device: TORCH_CUDA_ARCH_LIST=" +
                           capability +
                           " SYNCBN_CUDA=1 python -m pip install --no-build-isolation "
                           "--force-reinstall --no-deps syncbn");
}

inline void check(const char* op, cudaError_t error) {
  if (error == cudaSuccess) return;
  if (error == cudaErrorNoKernelImageForDevice) no_code(op);
  throw std::runtime_error(std::string(op) + ": CUDA error: " + cudaGetErrorString(error) + " (" +
                           cudaGetErrorName(error) + ")");
}

// Makes a device current, and the one before current again at the end.
class DeviceGuard {
 public:
  DeviceGuard(const char* op, int device) {
    check(op, cudaGetDevice(&before_));
    if (before_ == device) return;
    check(op, cudaSetDevice(device));
    changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// What ask() says of a device. It is asked once for each.
template <typename Fact, typename Ask>
Fact once_per_device(int device, Ask ask) {
  constexpr int kDevices = 64;
  static std::array<Fact, kDevices> known;
  static std::array<std::once_flag, kDevices> asked;
  if (device >= kDevices) return ask();
  std::call_once(asked[device], [&] { known[device] = ask(); });
  return known[device];
}

struct Device {
  uint32_t multiprocessors;
  int64_t l2_bytes;  // cache
};

inline Device device_facts(const char* op, int device) {
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    check(op, cudaDeviceGetAttribute(&value, which, device));
    return value;
  };
  return once_per_device<Device>(device, [&] {
    return Device{static_cast<uint32_t>(attribute(cudaDevAttrMultiProcessorCount)),
                  attribute(cudaDevAttrL2CacheSize)};
  });
}

// Whether a kernel may start while the one before it ends. Compiled for an older architecture, and
// translated when it is loaded, it does not wait there (overlap.cuh). Before 12.3, CUDA graphs
// could not hold such launches.
inline bool may_overlap(const char* op, const void* kernel) {
  int driver = 0;
  check(op, cudaDriverGetVersion(&driver));
  cudaFuncAttributes code{};
  check(op, cudaFuncGetAttributes(&code, kernel));
  return code.ptxVersion >= 90 && driver >= 12030;
}

// Launches a kernel that begins with wait_for_previous(). Where the device can, its blocks start,
// and wait there, while the kernel before it in the stream still ends: about a microsecond less
// each.
template <typename... Parameters, typename... Arguments>
void launch(const char* op, void (*kernel)(Parameters...), uint32_t blocks, uint32_t threads,
            const Execution& where, Arguments&&... arguments) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = static_cast<cudaStream_t>(where.stream);
  config.attrs = &early;
  config.numAttrs = once_per_device<bool>(
      where.device, [&] { return may_overlap(op, reinterpret_cast<const void*>(kernel)); });
  check(op, cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
}

// Calls launch(Access<...>{}, misalignment) with the access that dtype, layout and the addresses of
// all tensors [outer, C, inner] of the op allow, and the elements by which these addresses lie
// behind multiples of 16 bytes.
template <typename Launch>
void with_access(DType dtype, const Layout& layout, std::initializer_list<const void*> tensors,
                 Launch launch) {
  const auto with_type = [&](auto zero) {
    using T = decltype(zero);
    constexpr uint32_t kPack = 16 / sizeof(T);
    const auto address = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16; };
    const uintptr_t first = address(*tensors.begin());
    bool alike = first % sizeof(T) == 0;
    for (const void* tensor : tensors) alike = alike && address(tensor) == first;
    const auto misalignment = static_cast<uint32_t>(first / sizeof(T));
    const bool inner = layout.inner > 1;
    const bool whole = alike && first == 0 && (inner ? layout.inner : layout.channels) % kPack == 0;
    if (inner && whole) return launch(Access<T, true, Packs::whole>{}, misalignment);
    if (inner && alike) return launch(Access<T, true, Packs::partial>{}, misalignment);
    if (inner) return launch(Access<T, true, Packs::single>{}, misalignment);
    if (whole) return launch(Access<T, false, Packs::whole>{}, misalignment);
    return launch(Access<T, false, Packs::single>{}, misalignment);
  };
  switch (dtype) {
    case DType::float32:
      return with_type(float{});
    case DType::float16:
      return with_type(__half{});
    case DType::bfloat16:
      return with_type(__nv_bfloat16{});
    case DType::float64:
      return with_type(double{});
  }
}

// The workspace of a reduction: first the counters, then the pairs.
constexpr int64_t kMostGroups = 4096;
constexpr int64_t kMostPairs = (workspace_bytes() - kMostGroups * sizeof(uint32_t)) / sizeof(Pair);

inline Partials partials_of(const char* op, const Workspace& workspace) {
  if (workspace.bytes < workspace_bytes()) {
    throw std::runtime_error(std::string(op) + ": expected a workspace of " +
                             std::to_string(workspace_bytes()) + " bytes, got " +
                             std::to_string(workspace.bytes));
  }
  auto* arrived = static_cast<uint32_t*>(workspace.data);
  return {arrived, reinterpret_cast<Pair*>(arrived + kMostGroups)};
}

// `tensors`: how many the kernel reads.
template <typename A>
Plan reduction_plan(const char* op, const Layout& layout, uint32_t misalignment, int tensors,
                    int device) {
  const Device facts = device_facts(op, device);
  const uint32_t slots = A::kBlocksPerSM * facts.multiprocessors;
  Plan plan = make_plan<A>(layout, misalignment, {op, slots, 2, 0, kMostPairs, kMostGroups});
  // The next pass begins at the end of the tensors. Half of the L2 cache is kept for that end, by
  // reading what comes before so that it leaves the cache first. Where not all blocks run at once,
  // none knows what is read last.
  const double bytes = static_cast<double>(tensors) * layout.size() * sizeof(typename A::T);
  const double kept = facts.l2_bytes / 2 / bytes;
  if (kept < 1 && plan.blocks() <= slots) {
    plan.once = static_cast<uint32_t>((1 - kept) * plan.per_section);
  }
  return plan;
}

template <typename A>
Plan elementwise_plan(const char* op, const Layout& layout, uint32_t misalignment, int device) {
  const uint32_t slots = A::kBlocksPerSM * device_facts(op, device).multiprocessors;
  return make_plan<A>(layout, misalignment, {op, slots, 6, 1, 0, 0});
}

}  // namespace syncbn::cuda

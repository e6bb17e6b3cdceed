// What the device can read, and what a kernel boundary inside a graph costs: the two figures that
// the floors and plans stand on.
#include <algorithm>
#include <vector>

#include "backend/cuda/device_utils.cuh"
#include "backend/cuda/launch.h"
#include "device_array.h"
#include "report.h"
#include "test_device.h"

namespace xllm::check {
namespace {

// Streams `count` 16-byte pieces, eight in flight per thread.
__global__ void __launch_bounds__(256)
    read_kernel(const uint4 *data, size_t count, uint32_t *sink) {
  uint32_t sum = 0;
  const size_t stride = static_cast<size_t>(gridDim.x) * 256 * 8;
  for (size_t base = static_cast<size_t>(blockIdx.x) * 256 * 8 + threadIdx.x; base < count;
       base += stride) {
    uint4 v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      v[i] = base + i * 256 < count ? cuda::load_once_16(data + base + i * 256)
                                    : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
  }
  if (sum == 0x12345679u) *sink = sum;
}

__global__ void fill_kernel(uint4 *data, size_t count) {
  for (size_t i = static_cast<size_t>(blockIdx.x) * 256 + threadIdx.x; i < count;
       i += static_cast<size_t>(gridDim.x) * 256) {
    const uint32_t x = static_cast<uint32_t>(i) * 2654435761u;
    data[i] = make_uint4(x, x ^ 0x9e3779b9u, x * 3, x * 5);
  }
}

__global__ void boundary_kernel(int *value) {
  cuda::wait_for_previous_kernel();
  cuda::let_next_kernel_start();
  if (threadIdx.x == 0 && blockIdx.x == 0) *value += 1;
}

}  // namespace

void bench_bandwidth(Report *report) {
  const cuda::Device device = test_device();
  const cudaStream_t stream = test_stream();
  cudaEvent_t start, stop;
  cuda::check(cudaEventCreate(&start), "event");
  cuda::check(cudaEventCreate(&stop), "event");
  for (const size_t bytes : {size_t{64} << 20, size_t{256} << 20, size_t{4} << 30}) {
    const DeviceArray<uint4> data(bytes / 16);
    const DeviceArray<uint32_t> sink(1);
    fill_kernel<<<device.num_sms * 8, 256, 0, stream>>>(data.data(), bytes / 16);
    std::vector<float> times;
    for (int i = 0; i < 12; ++i) {
      cuda::check(cudaEventRecord(start, stream), "event");
      read_kernel<<<device.num_sms * 8, 256, 0, stream>>>(data.data(), bytes / 16, sink.data());
      cuda::check(cudaGetLastError(), "read");
      cuda::check(cudaEventRecord(stop, stream), "event");
      cuda::check(cudaEventSynchronize(stop), "event");
      float ms = 0;
      cuda::check(cudaEventElapsedTime(&ms, start, stop), "event");
      if (i >= 2) times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    const double ms = static_cast<double>(times[times.size() / 2]);
    report->row({{"bench", "read"},
                 {"mb", std::to_string(bytes >> 20)},
                 {"tb_per_s", number(static_cast<double>(bytes) / ms / 1e9)}});
  }
  for (const bool is_dependent : {false, true}) {
    cuda::Device with = device;
    with.has_dependent_launch = is_dependent && device.has_dependent_launch;
    const DeviceArray<int> value(1);
    constexpr int kKernels = 200;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < kKernels; ++i) {
      cuda::launch_kernel({&with, stream}, "boundary", boundary_kernel,
                          dim3(static_cast<unsigned>(device.num_sms)), 128, 0, value.data());
    }
    cuda::check(cudaStreamEndCapture(stream, &graph), "capture");
    cuda::check(cudaGraphInstantiate(&exec, graph, 0), "graph");
    float best = 1e9f;
    for (int i = 0; i < 10; ++i) {
      cuda::check(cudaEventRecord(start, stream), "event");
      cuda::check(cudaGraphLaunch(exec, stream), "graph");
      cuda::check(cudaEventRecord(stop, stream), "event");
      cuda::check(cudaEventSynchronize(stop), "event");
      float ms = 0;
      cuda::check(cudaEventElapsedTime(&ms, start, stop), "event");
      best = std::min(best, ms);
    }
    report->row({{"bench", "boundary"},
                 {"dependent_launch", is_dependent ? "yes" : "no"},
                 {"us", number(static_cast<double>(best) * 1e3 / kKernels)}});
    (void)cudaGraphExecDestroy(exec);
    (void)cudaGraphDestroy(graph);
  }
  (void)cudaEventDestroy(start);
  (void)cudaEventDestroy(stop);
}

}  // namespace xllm::check

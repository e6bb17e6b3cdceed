// What this process may really use of the machine: a container's quota, affinity and memory limit,
// not what the host shows.
#pragma once

#include <cstdint>
#include <string>

namespace xllm {

struct CpuLimits {
  int num_threads = 1;  // min(affinity, cgroup quota rounded down, physical cores), at least 1
  const char *decided_by =
      "affinity";  // which of them: "affinity", "cgroup quota" or "physical cores"
};

// Reads the limits of the calling process.
//   root           prefix of /proc and /sys; tests put a tree of their own there
//   affinity_cpus  CPUs that the process may run on; 0 asks the system
// The quota is the tightest along the path from the process's cgroup to the root (v2 cpu.max, v1
// cpu.cfs_quota_us); 7.65 CPUs count as 7. A file that is missing or unreadable limits nothing.
CpuLimits read_cpu_limits(const std::string &root = "", int affinity_cpus = 0);

struct MemoryLimits {
  uint64_t total_bytes = 0;  // min(the machine's memory, the tightest cgroup limit)
  uint64_t free_bytes =
      0;  // what can still be taken without swapping: MemAvailable, or what the cgroup has left
};

// As read_cpu_limits, for memory (v2 memory.max, v1 memory.limit_in_bytes). File pages that a
// cgroup could drop count as free.
MemoryLimits read_memory_limits(const std::string &root = "");

// The processor's name as /proc/cpuinfo gives it, or "unknown".
std::string read_cpu_name(const std::string &root = "");

}  // namespace xllm

#include "base/cpu_limits.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <limits>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

namespace xllm {
namespace {

bool read_line(const std::string &path, std::string *line) {
  std::ifstream file(path);
  return file && std::getline(file, *line);
}

bool read_number(const std::string &path, double *value) {
  std::string line;
  if (!read_line(path, &line)) return false;
  std::istringstream text(line);
  return static_cast<bool>(text >> *value);  // false for "max"
}

// One cgroup hierarchy that the process is in: where its files are, and the process's place in it.
struct Hierarchy {
  std::string mount;  // with the root prefix
  std::string path;   // from the mount, "/" or "/a/b"
};

// The folder's files, from the process's group up to the mount.
void for_each_level(const Hierarchy &hierarchy,
                    const std::function<void(const std::string &)> &visit) {
  std::string path = hierarchy.path;
  while (path.size() > 1) {
    visit(hierarchy.mount + path);
    const size_t slash = path.rfind('/');
    path = slash == std::string::npos || slash == 0 ? "/" : path.substr(0, slash);
  }
  visit(hierarchy.mount);
}

bool has_word(const std::string &list, const std::string &word) {
  std::istringstream items(list);
  std::string item;
  while (std::getline(items, item, ',')) {
    if (item == word) return true;
  }
  return false;
}

struct Mount {
  std::string root;  // the cgroup that the mount point shows
  std::string point;
  bool is_v2;
};

// Mount of a controller (v1) or of the unified hierarchy (v2, controller empty).
bool find_mount(const std::string &root, const std::string &controller, Mount *out) {
  std::ifstream file(root + "/proc/self/mountinfo");
  std::string line;
  while (std::getline(file, line)) {
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream head(line), tail(line.substr(dash + 3));
    std::string id, parent, device, mount_root, point, type, source, options;
    head >> id >> parent >> device >> mount_root >> point;
    tail >> type >> source >> options;
    if (controller.empty() ? type == "cgroup2"
                           : type == "cgroup" && has_word(options, controller)) {
      *out = {mount_root, point, controller.empty()};
      return true;
    }
  }
  return false;
}

// The process's hierarchy for a controller; v2 where `controller` is empty. False where there is
// none.
bool find_hierarchy(const std::string &root, const std::string &controller, Hierarchy *out) {
  Mount mount;
  if (!find_mount(root, controller, &mount)) return false;
  std::ifstream file(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {  // id:controllers:path
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    if (controller.empty() ? !controllers.empty() : !has_word(controllers, controller)) continue;
    // A container often sees its own group as the root of the mount while /proc still names it from
    // the host's root.
    if (mount.root.size() > 1) {
      path = path.compare(0, mount.root.size(), mount.root) == 0 ? path.substr(mount.root.size())
                                                                 : "/";
    }
    if (path.empty() || path[0] != '/' || path.find("/..") != std::string::npos) path = "/";
    *out = {root + mount.point, path};
    return true;
  }
  return false;
}

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

double cpu_quota(const std::string &root) {
  double quota = kNoLimit;
  Hierarchy hierarchy;
  if (find_hierarchy(root, "", &hierarchy)) {
    for_each_level(hierarchy, [&](const std::string &folder) {
      std::string line;
      double limit = 0, period = 0;
      if (!read_line(folder + "/cpu.max", &line)) return;
      std::istringstream text(line);
      if (text >> limit >> period && limit > 0 && period > 0)
        quota = std::min(quota, limit / period);
    });
  }
  if (find_hierarchy(root, "cpu", &hierarchy)) {
    for_each_level(hierarchy, [&](const std::string &folder) {
      double limit = 0, period = 0;
      if (!read_number(folder + "/cpu.cfs_quota_us", &limit) || limit <= 0) return;
      if (!read_number(folder + "/cpu.cfs_period_us", &period) || period <= 0) return;
      quota = std::min(quota, limit / period);
    });
  }
  return quota;
}

int affinity_count() {
  cpu_set_t small;
  if (sched_getaffinity(0, sizeof small, &small) == 0) return std::max(1, CPU_COUNT(&small));
  // More CPUs than cpu_set_t holds.
  for (int cpus = 4096; cpus <= 1 << 18; cpus *= 4) {
    std::vector<unsigned long> mask(static_cast<size_t>(cpus) / (8 * sizeof(unsigned long)));
    const size_t size = mask.size() * sizeof(unsigned long);
    if (sched_getaffinity(0, size, reinterpret_cast<cpu_set_t *>(mask.data())) == 0) {
      return std::max(1, CPU_COUNT_S(size, reinterpret_cast<cpu_set_t *>(mask.data())));
    }
  }
  return 1;
}

// Distinct (package, core) pairs of the CPUs that are online; 0 where the system does not say.
int physical_cores(const std::string &root) {
  std::set<std::pair<int, int>> cores;
  std::string online;
  if (!read_line(root + "/sys/devices/system/cpu/online", &online)) return 0;
  std::istringstream ranges(online);
  std::string range;
  while (std::getline(ranges, range, ',')) {  // "0-3,8"
    int first = 0, last = 0;
    char dash = 0;
    std::istringstream text(range);
    if (!(text >> first)) continue;
    if (!(text >> dash >> last)) last = first;
    for (int cpu = first; cpu <= last && cpu - first < (1 << 16); ++cpu) {
      const std::string folder =
          root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
      double package = 0, core = 0;
      if (!read_number(folder + "core_id", &core)) continue;
      read_number(folder + "physical_package_id", &package);
      cores.insert({static_cast<int>(package), static_cast<int>(core)});
    }
  }
  return static_cast<int>(cores.size());
}

// The value of a "Key:   123 kB" line of /proc/meminfo in bytes, 0 where it is missing.
uint64_t meminfo_bytes(const std::string &root, const std::string &key) {
  std::ifstream file(root + "/proc/meminfo");
  std::string line;
  while (std::getline(file, line)) {
    if (line.compare(0, key.size() + 1, key + ":") != 0) continue;
    std::istringstream text(line.substr(key.size() + 1));
    uint64_t kilobytes = 0;
    return text >> kilobytes ? kilobytes * 1024 : 0;
  }
  return 0;
}

// The value of "key 123" in a file of such lines, 0 where it is missing.
double stat_value(const std::string &path, const std::string &key) {
  std::ifstream file(path);
  std::string name;
  double value = 0;
  while (file >> name >> value) {
    if (name == key) return value;
  }
  return 0;
}

}  // namespace

CpuLimits read_cpu_limits(const std::string &root, int affinity_cpus) {
  CpuLimits limits;
  limits.num_threads = affinity_cpus > 0 ? affinity_cpus : affinity_count();
  const int cores = physical_cores(root);
  if (cores > 0 && cores < limits.num_threads) limits = {cores, "physical cores"};
  const double quota = cpu_quota(root);
  if (quota < limits.num_threads) limits = {std::max(1, static_cast<int>(quota)), "cgroup quota"};
  return limits;
}

MemoryLimits read_memory_limits(const std::string &root) {
  MemoryLimits limits = {meminfo_bytes(root, "MemTotal"), meminfo_bytes(root, "MemAvailable")};
  const auto apply = [&](const std::string &folder, const char *limit_file, const char *usage_file,
                         const char *reclaimable) {
    double limit = 0, usage = 0;
    if (!read_number(folder + limit_file, &limit)) return;
    if (limits.total_bytes != 0 && limit >= static_cast<double>(limits.total_bytes)) return;
    read_number(folder + usage_file, &usage);
    usage -= std::min(usage, stat_value(folder + "/memory.stat", reclaimable));
    limits.total_bytes = static_cast<uint64_t>(limit);
    const auto left = static_cast<uint64_t>(std::max(0.0, limit - usage));
    limits.free_bytes = std::min(limits.free_bytes, left);
  };
  Hierarchy hierarchy;
  if (find_hierarchy(root, "", &hierarchy)) {
    for_each_level(hierarchy, [&](const std::string &folder) {
      apply(folder, "/memory.max", "/memory.current", "inactive_file");
    });
  }
  if (find_hierarchy(root, "memory", &hierarchy)) {
    for_each_level(hierarchy, [&](const std::string &folder) {
      apply(folder, "/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file");
    });
  }
  return limits;
}

std::string read_cpu_name(const std::string &root) {
  std::ifstream file(root + "/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    if (line.compare(0, 10, "model name") != 0) continue;
    const size_t start = line.find_first_not_of(" \t", line.find(':') + 1);
    if (start != std::string::npos) return line.substr(start);
  }
  return "unknown";
}

}  // namespace xllm

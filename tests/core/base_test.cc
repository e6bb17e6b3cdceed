// Small numbers and bits, and what the process may use of the machine.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "base/checked.h"
#include "base/cpu_limits.h"
#include "base/half.h"
#include "base/rng.h"
#include "base/span.h"

namespace xllm {
namespace {

constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();

TEST(CheckedTest, OverflowIsSeenAndLeavesTheResultAlone) {
  uint64_t out = 7;
  EXPECT_FALSE(checked_add(kMax, 1, &out));
  EXPECT_FALSE(checked_mul(kMax / 2 + 1, 2, &out));
  EXPECT_FALSE(checked_align(kMax - 3, 32, &out));
  EXPECT_EQ(out, 7u);
  EXPECT_TRUE(checked_add(kMax - 1, 1, &out));
  EXPECT_EQ(out, kMax);
  EXPECT_TRUE(checked_mul(0, kMax, &out));
  EXPECT_EQ(out, 0u);
  EXPECT_TRUE(checked_align(33, 32, &out));
  EXPECT_EQ(out, 64u);
  EXPECT_EQ(ceil_div(kMax, 2), kMax / 2 + 1);
}

TEST(HalfTest, EveryHalfSurvivesTheTripThroughFloat) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = half_to_float(half);
    const uint16_t back = float_to_half(value);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(half_to_float(back)));
    } else {
      EXPECT_EQ(back, half);
    }
  }
}

TEST(HalfTest, RoundsToNearestEvenAtEveryEdge) {
  EXPECT_EQ(float_to_half(1.0f + 0x1p-11f), 0x3c00);      // tie, to even
  EXPECT_EQ(float_to_half(1.0f + 3 * 0x1p-11f), 0x3c02);  // tie, to even
  EXPECT_EQ(float_to_half(1.0f + 0x1p-11f + 0x1p-20f), 0x3c01);
  EXPECT_EQ(float_to_half(65519.996f), 0x7bff);
  EXPECT_EQ(float_to_half(65520.0f), 0x7c00);
  EXPECT_EQ(float_to_half(0x1p-25f), 0x0000);  // tie, to even
  EXPECT_EQ(float_to_half(0x1.000002p-25f), 0x0001);
  EXPECT_EQ(float_to_half(-0x1p-24f), 0x8001);
  EXPECT_EQ(float_to_bfloat16(1.0f + 0x1p-8f), 0x3f80);
  EXPECT_EQ(float_to_bfloat16(1.0f + 3 * 0x1p-8f), 0x3f82);
  EXPECT_EQ(bfloat16_to_float(0xc040), -3.0f);
}

// Known answers published with the generator.
TEST(PhiloxTest, KnownAnswers) {
  const Philox zero = philox(0, 0, 0);
  EXPECT_EQ(zero.value[0], 0x6627e8d5u);
  EXPECT_EQ(zero.value[1], 0xe169c58du);
  EXPECT_EQ(zero.value[2], 0xbc57ac4cu);
  EXPECT_EQ(zero.value[3], 0x9b00dbd8u);
  const Philox ones = philox(kMax, kMax, kMax);
  EXPECT_EQ(ones.value[0], 0x408f276du);
  EXPECT_EQ(ones.value[1], 0x41c83b0eu);
  EXPECT_EQ(ones.value[2], 0xa20bc7c6u);
  EXPECT_EQ(ones.value[3], 0x6d5451fdu);
  EXPECT_EQ(uniform_float(0), 0.0f);
  EXPECT_LT(uniform_float(0xffffffffu), 1.0f);
}

TEST(SpanTest, ViewsAVectorAndItsParts) {
  std::vector<int> values = {1, 2, 3, 4};
  const Span<int> span(values);
  span[1] = 20;
  EXPECT_EQ(values[1], 20);
  const Span<const int> middle = Span<const int>(values).subspan(1, 2);
  EXPECT_EQ(middle.size(), 2u);
  EXPECT_EQ(middle[1], 3);
}

// A folder that plays the root of a machine.
class FakeRoot {
 public:
  FakeRoot() {
    std::string pattern = (std::filesystem::temp_directory_path() / "xllm-root-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) std::abort();
    path_ = pattern;
    write("/proc/meminfo",
          "MemTotal:       1000000 kB\nMemFree:  1 kB\nMemAvailable:    600000 kB\n");
  }
  ~FakeRoot() { std::filesystem::remove_all(path_); }
  FakeRoot(const FakeRoot &) = delete;
  FakeRoot &operator=(const FakeRoot &) = delete;

  void write(const std::string &file, const std::string &text) const {
    const std::filesystem::path full = path_ + file;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << text;
  }
  // `cores` physical cores with two threads each.
  void add_cores(int cores) const {
    write("/sys/devices/system/cpu/online", "0-" + std::to_string(2 * cores - 1) + "\n");
    for (int cpu = 0; cpu < 2 * cores; ++cpu) {
      const std::string folder = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
      write(folder + "core_id", std::to_string(cpu % cores) + "\n");
      write(folder + "physical_package_id", "0\n");
    }
  }
  void mount_v2(const std::string &own_group, const std::string &mount_root = "/") const {
    write("/proc/self/mountinfo",
          "25 1 0:22 / /proc rw - proc proc rw\n31 23 0:28 " + mount_root +
              " /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw\n");
    write("/proc/self/cgroup", "0::" + own_group + "\n");
  }
  void mount_v1(const std::string &own_group) const {
    write("/proc/self/mountinfo",
          "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
          "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n");
    write("/proc/self/cgroup",
          "4:memory:" + own_group + "\n3:cpu,cpuacct:" + own_group + "\n2:name=systemd:/x\n");
  }
  const std::string &path() const { return path_; }

 private:
  std::string path_;
};

CpuLimits limits_of(const FakeRoot &root, int affinity) {
  return read_cpu_limits(root.path(), affinity);
}

TEST(CpuLimitsTest, TheSmallestLimitDecidesAndIsNamed) {
  const FakeRoot root;
  root.add_cores(16);
  EXPECT_EQ(limits_of(root, 4).num_threads, 4);
  EXPECT_STREQ(limits_of(root, 4).decided_by, "affinity");
  EXPECT_EQ(limits_of(root, 32).num_threads, 16);
  EXPECT_STREQ(limits_of(root, 32).decided_by, "physical cores");
}

TEST(CpuLimitsTest, QuotaOfCgroupV2IsRoundedDown) {
  const FakeRoot root;
  root.add_cores(12);
  root.mount_v2("/app");
  root.write("/sys/fs/cgroup/app/cpu.max", "765000 100000\n");
  EXPECT_EQ(limits_of(root, 24).num_threads, 7);
  EXPECT_STREQ(limits_of(root, 24).decided_by, "cgroup quota");
  EXPECT_EQ(limits_of(root, 4).num_threads, 4);
  root.write("/sys/fs/cgroup/app/cpu.max", "max 100000\n");
  EXPECT_EQ(limits_of(root, 24).num_threads, 12);
  root.write("/sys/fs/cgroup/app/cpu.max", "50000 100000\n");
  EXPECT_EQ(limits_of(root, 24).num_threads, 1);
}

TEST(CpuLimitsTest, QuotaOnAParentGroupCounts) {
  const FakeRoot root;
  root.add_cores(12);
  root.mount_v2("/pods/pod7/app");
  root.write("/sys/fs/cgroup/pods/pod7/app/cpu.max", "900000 100000\n");
  root.write("/sys/fs/cgroup/pods/pod7/cpu.max", "350000 100000\n");
  root.write("/sys/fs/cgroup/pods/cpu.max", "max 100000\n");
  EXPECT_EQ(limits_of(root, 24).num_threads, 3);
}

TEST(CpuLimitsTest, AContainerThatSeesItsGroupAsTheRoot) {
  const FakeRoot root;
  root.add_cores(12);
  root.mount_v2("/docker/abc/inner", "/docker/abc");
  root.write("/sys/fs/cgroup/cpu.max", "200000 100000\n");
  root.write("/sys/fs/cgroup/inner/cpu.max", "max 100000\n");
  EXPECT_EQ(limits_of(root, 24).num_threads, 2);
}

TEST(CpuLimitsTest, QuotaOfCgroupV1AlsoOnAParent) {
  const FakeRoot root;
  root.add_cores(12);
  root.mount_v1("/docker/abc");
  root.write("/sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us", "-1\n");
  root.write("/sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(limits_of(root, 24).num_threads, 12);
  root.write("/sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_quota_us", "250000\n");
  root.write("/sys/fs/cgroup/cpu,cpuacct/docker/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(limits_of(root, 24).num_threads, 2);
}

TEST(CpuLimitsTest, NothingReadableLimitsNothing) {
  const FakeRoot root;
  root.write("/proc/self/mountinfo", "garbage\n31 23 - \n");
  root.write("/proc/self/cgroup", "no colons here\n0::\n");
  root.write("/sys/devices/system/cpu/online", "0-\n");
  EXPECT_EQ(limits_of(root, 6).num_threads, 6);
  EXPECT_GE(read_cpu_limits().num_threads, 1);  // this very machine
}

TEST(MemoryLimitsTest, TheCgroupGrantsLessThanTheMachineHas) {
  const FakeRoot root;
  EXPECT_EQ(read_memory_limits(root.path()).total_bytes, 1024000000u);
  EXPECT_EQ(read_memory_limits(root.path()).free_bytes, 614400000u);
  root.mount_v2("/pods/app");
  root.write("/sys/fs/cgroup/pods/app/memory.max", "max\n");
  root.write("/sys/fs/cgroup/pods/memory.max", "500000000\n");
  root.write("/sys/fs/cgroup/pods/memory.current", "300000000\n");
  root.write("/sys/fs/cgroup/pods/memory.stat", "anon 100\ninactive_file 100000000\n");
  EXPECT_EQ(read_memory_limits(root.path()).total_bytes, 500000000u);
  EXPECT_EQ(read_memory_limits(root.path()).free_bytes, 300000000u);
}

TEST(MemoryLimitsTest, CgroupV1AndItsWayOfSayingUnlimited) {
  const FakeRoot root;
  root.mount_v1("/app");
  root.write("/sys/fs/cgroup/memory/app/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(read_memory_limits(root.path()).total_bytes, 1024000000u);
  root.write("/sys/fs/cgroup/memory/app/memory.limit_in_bytes", "400000000\n");
  root.write("/sys/fs/cgroup/memory/app/memory.usage_in_bytes", "390000000\n");
  root.write("/sys/fs/cgroup/memory/app/memory.stat", "total_inactive_file 50000000\n");
  EXPECT_EQ(read_memory_limits(root.path()).total_bytes, 400000000u);
  EXPECT_EQ(read_memory_limits(root.path()).free_bytes, 60000000u);
}

TEST(CpuNameTest, ReadsTheModelName) {
  const FakeRoot root;
  root.write("/proc/cpuinfo", "processor\t: 0\nmodel name\t: Imaginary 9000\n");
  EXPECT_EQ(read_cpu_name(root.path()), "Imaginary 9000");
  EXPECT_EQ(read_cpu_name(root.path() + "/nowhere"), "unknown");
}

}  // namespace
}  // namespace xllm

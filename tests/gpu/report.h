// What the check prints and writes: one line per check or measurement, a table last, JSON where
// asked for.
#pragma once

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace xllm::check {

class Report {
 public:
  // One verdict. `detail` says by how much.
  void verdict(const std::string &name, bool is_good, const std::string &detail) {
    ++(is_good ? num_good_ : num_bad_);
    if (!is_good || is_verbose)
      std::printf("%s  %-60s %s\n", is_good ? "ok  " : "FAIL", name.c_str(), detail.c_str());
    if (!is_good) failures_.push_back(name + "  " + detail);
    std::fflush(stdout);
  }

  // One row of measurements: (column, value) with numbers already formatted; strings in JSON, all
  // of them.
  void row(std::vector<std::pair<std::string, std::string>> cells) {
    for (const auto &cell : cells) std::printf("%s=%s  ", cell.first.c_str(), cell.second.c_str());
    std::printf("\n");
    std::fflush(stdout);
    rows_.push_back(std::move(cells));
  }

  // Failures and totals; the exit status.
  int finish() const {
    std::printf("\n==== measurements\n");
    for (const auto &row : rows_) {
      for (const auto &cell : row) std::printf("%s=%s  ", cell.first.c_str(), cell.second.c_str());
      std::printf("\n");
    }
    std::printf("==== checks: %d good, %d bad\n", num_good_, num_bad_);
    for (size_t i = 0; i < failures_.size() && i < 40; ++i)
      std::printf("FAIL  %s\n", failures_[i].c_str());
    return num_bad_ == 0 ? 0 : 1;
  }

  bool write_json(const std::string &path) const {
    std::FILE *file = std::fopen(path.c_str(), "w");
    if (file == nullptr) return false;
    std::fprintf(file, "{\"good\": %d, \"bad\": %d,\n \"failures\": [", num_good_, num_bad_);
    for (size_t i = 0; i < failures_.size(); ++i)
      std::fprintf(file, "%s\"%s\"", i == 0 ? "" : ", ", failures_[i].c_str());
    std::fprintf(file, "],\n \"rows\": [");
    for (size_t i = 0; i < rows_.size(); ++i) {
      std::fprintf(file, "%s\n  {", i == 0 ? "" : ",");
      for (size_t j = 0; j < rows_[i].size(); ++j) {
        std::fprintf(file, "%s\"%s\": \"%s\"", j == 0 ? "" : ", ", rows_[i][j].first.c_str(),
                     rows_[i][j].second.c_str());
      }
      std::fprintf(file, "}");
    }
    std::fprintf(file, "\n]}\n");
    return std::fclose(file) == 0;
  }

  bool is_verbose = false;

 private:
  int num_good_ = 0, num_bad_ = 0;
  std::vector<std::string> failures_;
  std::vector<std::vector<std::pair<std::string, std::string>>> rows_;
};

inline std::string number(double value, const char *format = "%.4g") {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

// The parts, one file each.
struct Options {
  std::vector<std::string> models = {"qwen3-8b", "llama3-8b", "qwen2.5-1.5b"};
  std::vector<int> batch_sizes = {1, 2, 4, 8, 16, 32, 64};
  std::vector<int> prompt_tokens = {64, 128, 256, 512};
  int num_steps = 48;
  int context = 128;
  double read_bandwidth = 4.66e12;
  int attention_depth = 0;  // Device's, 0: as it finds best
  bool has_breakdown = true;
  std::vector<std::string> variants = {"0", "0-"};  // bench_decode.cu
  bool is_quick = false;
  bool is_tiny = false;
};
void check_repack(Report *report);
// is_quick: one model and one step; is_tiny: the least that runs every kernel once or twice, for
// tools that slow the device down a hundredfold.
void check_rows(Report *report, bool is_tiny);
void check_matmul(Report *report, bool is_tiny);
void check_attention(Report *report, bool is_tiny);
void check_stages(Report *report, bool is_quick);
void check_invariance(Report *report, bool is_quick);
void check_sample(Report *report, bool is_quick, bool is_tiny);
void check_graphs(Report *report, bool is_tiny);
void bench_bandwidth(Report *report);
void bench_sample(Report *report);
void bench_prompt_attention(Report *report, const Options &options);
void bench_decode(Report *report, const Options &options);
void bench_prefill(Report *report, const Options &options);

}  // namespace xllm::check

// cuda_backend_check
//   [--parts repack,rows,matmul,sample,graphs,stages,attention,invariance,bandwidth,sampler,
//            prompt_attention,decode,prefill]
//   [--models NAME[:q4_k_m|q6_k|q8_0],...] [--bs N,...] [--steps N] [--context N] [--tokens N,...]
//   [--attention-depth N] [--quick] [--tiny] [--no-breakdown] [--variants C,...] [--json PATH]
//   [--verbose]
// Exit status 0: everything that was checked is right.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "report.h"

namespace {

std::vector<std::string> split(const std::string &text) {
  std::vector<std::string> parts;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    if (comma > at) parts.push_back(text.substr(at, comma - at));
    at = comma + 1;
  }
  return parts;
}

}  // namespace

int main(int argc, char **argv) {
  using xllm::check::Report;
  std::vector<std::string> parts = {
      "repack",     "rows",      "matmul",  "sample",           "graphs", "stages", "attention",
      "invariance", "bandwidth", "sampler", "prompt_attention", "decode", "prefill"};
  xllm::check::Options options;
  Report report;
  std::string json;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const char *value = i + 1 < argc ? argv[i + 1] : "";
    if (flag == "--verbose") {
      report.is_verbose = true;
    } else if (flag == "--quick") {
      options.is_quick = true;
    } else if (flag == "--tiny") {
      options.is_quick = options.is_tiny = true;
    } else if (flag == "--no-breakdown") {
      options.has_breakdown = false;
      options.variants.clear();
    } else if (flag == "--parts") {
      parts = split(value), ++i;
    } else if (flag == "--models") {
      options.models = split(value), ++i;
    } else if (flag == "--bs") {
      options.batch_sizes.clear();
      for (const std::string &n : split(value)) options.batch_sizes.push_back(std::atoi(n.c_str()));
      ++i;
    } else if (flag == "--tokens") {
      options.prompt_tokens.clear();
      for (const std::string &n : split(value))
        options.prompt_tokens.push_back(std::atoi(n.c_str()));
      ++i;
    } else if (flag == "--variants") {
      options.variants = split(value), ++i;
    } else if (flag == "--steps") {
      options.num_steps = std::atoi(value), ++i;
    } else if (flag == "--context") {
      options.context = std::atoi(value), ++i;
    } else if (flag == "--attention-depth") {
      options.attention_depth = std::atoi(value), ++i;
    } else if (flag == "--json") {
      json = value, ++i;
    } else {
      std::fprintf(stderr, "unknown option %s; see the first lines of tests/gpu/main.cc\n",
                   argv[i]);
      return 2;
    }
  }
  for (const std::string &part : parts) {
    std::printf("---- %s\n", part.c_str());
    try {
      if (part == "repack") xllm::check::check_repack(&report);
      if (part == "rows") xllm::check::check_rows(&report, options.is_tiny);
      if (part == "matmul") xllm::check::check_matmul(&report, options.is_tiny);
      if (part == "sample") xllm::check::check_sample(&report, options.is_quick, options.is_tiny);
      if (part == "graphs") xllm::check::check_graphs(&report, options.is_tiny);
      if (part == "stages") xllm::check::check_stages(&report, options.is_quick);
      if (part == "attention") xllm::check::check_attention(&report, options.is_tiny);
      if (part == "invariance") xllm::check::check_invariance(&report, options.is_quick);
      if (part == "bandwidth") xllm::check::bench_bandwidth(&report);
      if (part == "sampler") xllm::check::bench_sample(&report);
      if (part == "prompt_attention") xllm::check::bench_prompt_attention(&report, options);
      if (part == "decode") xllm::check::bench_decode(&report, options);
      if (part == "prefill") xllm::check::bench_prefill(&report, options);
    } catch (const std::exception &error) {
      report.verdict(part + ": ran to its end", false, error.what());
    }
  }
  if (!json.empty() && !report.write_json(json))
    std::fprintf(stderr, "cannot write %s\n", json.c_str());
  return report.finish();
}

// A caller's description of a generation, checked as far as reading it safely needs.
#pragma once

#include "engine/request.h"
#include "xllm.h"

namespace xllm {

// Copies the salt. Error(kInvalidArgument, detail "field").
void read_cache(const xllm_cache_options &in, RequestOptions *out);

SamplingParams read_sampling(const xllm_sampling_params &params);

// Copies everything that `in` points to. Error(kInvalidArgument, detail "field"), and
// Error(kPromptTooLong).
RequestOptions read_request(const xllm_request *in, int max_seq_len);

}  // namespace xllm

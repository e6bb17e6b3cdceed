// The threads of a CTA as fibers: each runs until it waits for others.
#pragma once

#include <functional>

#include "cuda_fp16.h"

namespace xllm::on_host {

// Runs body() once per thread of every CTA of the grid. before_cta: what a CTA finds in shared
// memory is up to it. Throws where threads wait for one another for ever.
void run_grid(Index3 grid, int threads, const std::function<void()> &before_cta,
              const std::function<void()> &body);

}  // namespace xllm::on_host

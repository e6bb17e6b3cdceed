// Tokens that an engine generates, for machines where there is no Python to ask it: requests on
// stdin, answers on stdout. The C ABI is all it uses.
//
//   generate_cli MODEL NUM_THREADS INSTRUCTION_SET CHUNK MAX_SLOTS f16|int8|int4
//
//   request  one line: max_tokens temperature top_k top_p min_p repetition_penalty seed num_ids
//            ids... (see xllm_sampling_params); ends of generation are ignored
//   answer   first a line with the kernels in use; then one line for each request, in the order
//            given: num_tokens, and for each its id and the bits of its logprob in hex
//
// NUM_THREADS 0 and INSTRUCTION_SET "best" leave the choice to the engine. All requests are queued
// before the first one is answered. Ends with 1 and a line on stderr when anything fails.
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iostream>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "xllm.h"

namespace {

struct Answer {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
};

void check(xllm_status status, const xllm_error &err) {
  if (status != XLLM_STATUS_OK) throw std::runtime_error(err.message);
}

xllm_kv_type kv_type_of(const std::string &name) {
  if (name == "f16") return XLLM_KV_TYPE_F16;
  if (name == "int8") return XLLM_KV_TYPE_INT8;
  if (name == "int4") return XLLM_KV_TYPE_INT4;
  throw std::runtime_error("expected f16, int8 or int4, found " + name);
}

using EnginePtr = std::unique_ptr<xllm_engine, decltype(&xllm_engine_destroy)>;

EnginePtr make_engine(char **argv) {
  xllm_error err;
  xllm_engine_config config;
  xllm_engine_config_init(&config);
  config.backend = XLLM_BACKEND_CPU;
  config.num_threads = std::stoi(argv[2]);
  if (std::strcmp(argv[3], "best") != 0) config.instruction_set = argv[3];
  config.prefill_chunk = std::stoi(argv[4]);
  config.max_slots = std::stoi(argv[5]);
  config.kv_type = kv_type_of(argv[6]);
  config.max_seq_len = 512;
  config.kv_memory = uint64_t{256} << 20;
  xllm_model *opened = nullptr;
  check(xllm_model_open(argv[1], nullptr, &opened, &err), err);
  const std::unique_ptr<xllm_model, decltype(&xllm_model_close)> model(opened, xllm_model_close);
  xllm_engine *engine = nullptr;
  check(xllm_engine_create(model.get(), &config, &engine, &err), err);
  return EnginePtr(engine, xllm_engine_destroy);
}

// Reads one request and queues it; false at the end of the input.
bool submit_next(xllm_engine *engine, uint64_t *id) {
  xllm_request request;
  xllm_request_init(&request);
  xllm_sampling_params &sampling = request.sampling;
  if (!(std::cin >> request.max_tokens)) return false;
  std::cin >> sampling.temperature >> sampling.top_k >> sampling.top_p >> sampling.min_p >>
      sampling.repetition_penalty >> sampling.seed >> request.num_prompt;
  if (!std::cin || request.num_prompt > 100000) throw std::runtime_error("a request is malformed");
  std::vector<int32_t> prompt(request.num_prompt);
  for (int32_t &token : prompt) std::cin >> token;
  if (!std::cin) throw std::runtime_error("the input ends early");
  sampling.has_seed = 1;
  request.prompt = prompt.data();
  request.ignore_eos = 1;
  request.num_logprobs = 0;
  xllm_error err;
  check(xllm_engine_submit(engine, &request, id, &err), err);
  return true;
}

// Takes events until every request has finished.
void collect(xllm_engine *engine, std::map<uint64_t, Answer> *answers) {
  for (size_t num_live = answers->size(); num_live > 0;) {
    xllm_error err;
    xllm_events *taken = nullptr;
    check(xllm_engine_take_events(engine, 0, -1, &taken, &err), err);
    const std::unique_ptr<xllm_events, decltype(&xllm_events_destroy)> events(taken,
                                                                              xllm_events_destroy);
    for (size_t i = 0; i < xllm_events_count(taken); ++i) {
      const xllm_event &event = *xllm_events_get(taken, i);
      Answer &answer = answers->at(event.request_id);
      if (event.kind == XLLM_EVENT_TOKEN) {
        answer.ids.push_back(event.token_id);
        answer.logprobs.push_back(event.logprob);
      } else if (event.kind == XLLM_EVENT_FINISHED) {
        if (event.status != XLLM_STATUS_OK) throw std::runtime_error(event.message);
        --num_live;
      }
    }
  }
}

void serve(char **argv) {
  const EnginePtr engine = make_engine(argv);
  xllm_engine_info info;
  xllm_engine_get_info(engine.get(), &info);
  std::printf("%s\n", info.kernels);
  std::map<uint64_t, Answer> answers;
  std::vector<uint64_t> order;
  for (uint64_t id; submit_next(engine.get(), &id);) {
    order.push_back(id);
    answers[id] = {};
  }
  collect(engine.get(), &answers);
  for (const uint64_t id : order) {
    const Answer &answer = answers[id];
    std::printf("%zu", answer.ids.size());
    for (size_t i = 0; i < answer.ids.size(); ++i) {
      uint32_t bits;
      std::memcpy(&bits, &answer.logprobs[i], sizeof bits);
      std::printf(" %" PRId32 " %08" PRIx32, answer.ids[i], bits);
    }
    std::printf("\n");
  }
}

}  // namespace

int main(int argc, char **argv) {
  if (argc != 7) {
    std::fprintf(stderr,
                 "usage: generate_cli MODEL NUM_THREADS INSTRUCTION_SET CHUNK MAX_SLOTS "
                 "f16|int8|int4\n");
    return 2;
  }
  try {
    serve(argv);
    return 0;
  } catch (const std::exception &error) {
    std::fprintf(stderr, "generate_cli: %s\n", error.what());
    return 1;
  }
}

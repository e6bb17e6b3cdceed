/* The C ABI from C11: the header is C, handles behave, every wrong argument gets a status. */
#define _POSIX_C_SOURCE 200809L /* mkstemp */

#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "xllm.h"

static int num_failures = 0;

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) {                                                       \
      fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      ++num_failures;                                                         \
    }                                                                         \
  } while (0)

#define CHECK_STATUS(expected, call)                                        \
  do {                                                                      \
    const xllm_status found_status = (call);                                \
    if (found_status != (expected)) {                                       \
      fprintf(stderr, "%s:%d: %s gave %s: %s\n", __FILE__, __LINE__, #call, \
              xllm_status_name(found_status), err.message);                 \
      ++num_failures;                                                       \
    }                                                                       \
  } while (0)

static xllm_error err;

/* tests/data/forward/NAME beside this file. */
static void data_path(const char *name, char *out, size_t capacity) {
  const char *slash = strrchr(__FILE__, '/');
  const int folder = slash != NULL ? (int)(slash - __FILE__) + 1 : 0;
  snprintf(out, capacity, "%.*s../data/forward/%s", folder, __FILE__, name);
}

/* ---- a GGUF file that holds only a vocabulary ---- */

static void put_u32(FILE *file, uint32_t value) { fwrite(&value, sizeof value, 1, file); }
static void put_u64(FILE *file, uint64_t value) { fwrite(&value, sizeof value, 1, file); }
static void put_text(FILE *file, const char *text) {
  put_u64(file, strlen(text));
  fwrite(text, 1, strlen(text), file);
}
static void put_key(FILE *file, const char *key, uint32_t type) {
  put_text(file, key);
  put_u32(file, type);
}

static void write_vocabulary(const char *path) {
  enum { U32 = 4, I32 = 5, STR = 8, ARR = 9, NUM_TOKENS = 28 };
  FILE *file = fopen(path, "wb");
  if (file == NULL) {
    perror(path);
    exit(1);
  }
  fwrite("GGUF", 1, 4, file);
  put_u32(file, 3);
  put_u64(file, 0); /* tensors */
  put_u64(file, 7); /* keys */
  put_key(file, "general.architecture", STR);
  put_text(file, "llama");
  put_key(file, "tokenizer.ggml.model", STR);
  put_text(file, "gpt2");
  put_key(file, "tokenizer.ggml.pre", STR);
  put_text(file, "gpt-2");
  put_key(file, "tokenizer.ggml.tokens", ARR);
  put_u32(file, STR);
  put_u64(file, NUM_TOKENS);
  for (char c = 'a'; c <= 'z'; ++c) {
    const char token[2] = {c, '\0'};
    put_text(file, token);
  }
  put_text(file, "<|im_end|>");
  put_text(file, "ab");
  put_key(file, "tokenizer.ggml.token_type", ARR);
  put_u32(file, I32);
  put_u64(file, NUM_TOKENS);
  for (int i = 0; i < NUM_TOKENS; ++i) put_u32(file, i == 26 ? 3 : 1);
  put_key(file, "tokenizer.ggml.merges", ARR);
  put_u32(file, STR);
  put_u64(file, 1);
  put_text(file, "a b");
  put_key(file, "tokenizer.ggml.eos_token_id", U32);
  put_u32(file, 26);
  fclose(file);
}

static void test_library(void) {
  CHECK(strcmp(xllm_status_name(XLLM_STATUS_DECODE_MODE_MISMATCH), "DECODE_MODE_MISMATCH") == 0);
  CHECK(strcmp(xllm_status_name((xllm_status)999), "UNKNOWN") == 0);
  for (int status = 0; status <= XLLM_STATUS_INTERNAL; ++status) {
    CHECK(strcmp(xllm_status_name((xllm_status)status), "UNKNOWN") != 0);
  }
  CHECK(xllm_abi_version() == XLLM_ABI_VERSION);
  CHECK(strlen(xllm_version()) >= 5);
  CHECK(strlen(xllm_build_id()) > 0);
  xllm_free(NULL);
}

static void test_vocabulary(void) {
  char path[] = "/tmp/xllm_capi_test_XXXXXX";
  const int fd = mkstemp(path);
  CHECK(fd >= 0);
  close(fd);
  write_vocabulary(path);
  xllm_model *model = NULL;
  CHECK_STATUS(XLLM_STATUS_OK, xllm_model_open(path, NULL, &model, &err));
  unlink(path);
  if (model == NULL) return;

  xllm_model_info info;
  xllm_model_get_info(model, &info);
  CHECK(info.has_weights == 0);
  CHECK(info.vocab_size == 28);
  CHECK(info.has_tokenizer == 1);
  CHECK(strcmp(info.tokenizer_model, "gpt2") == 0);
  CHECK(strcmp(info.architecture, "llama") == 0);

  xllm_metadata metadata;
  int has_tokens = 0;
  for (size_t i = 0; xllm_model_get_metadata(model, i, &metadata); ++i) {
    if (strcmp(metadata.key, "tokenizer.ggml.tokens") != 0) continue;
    has_tokens = 1;
    CHECK(strcmp(metadata.type, "array of string") == 0);
    CHECK(strstr(metadata.value_json, "\"p\", \"...\"]") != NULL);
  }
  CHECK(has_tokens);
  xllm_end_token end;
  CHECK(xllm_model_get_end_token(model, 0, &end) == 1);
  CHECK(end.token_id == 26 && strcmp(end.text, "<|im_end|>") == 0);
  CHECK(xllm_model_get_end_token(model, 1, &end) == 0);

  /* A control token is one in trusted text alone. */
  const xllm_text texts[] = {{"abc", 3, 0}, {"<|im_end|>", 10, 1}, {"xab", 3, 0}};
  int32_t *ids = NULL;
  size_t num_ids = 0;
  CHECK_STATUS(XLLM_STATUS_OK, xllm_model_encode(model, texts, 3, 0, &ids, &num_ids, &err));
  const int32_t expected[] = {27, 2, 26, 23, 27};
  CHECK(num_ids == 5 && memcmp(ids, expected, sizeof expected) == 0);
  char *text = NULL;
  size_t text_size = 0;
  CHECK_STATUS(XLLM_STATUS_OK, xllm_model_decode(model, ids, num_ids, 0, &text, &text_size, &err));
  CHECK(text_size == 6 && strcmp(text, "abcxab") == 0);
  xllm_free(text);
  CHECK_STATUS(XLLM_STATUS_OK, xllm_model_decode(model, ids, num_ids, 1, &text, &text_size, &err));
  CHECK(strcmp(text, "abc<|im_end|>xab") == 0);
  xllm_free(text);
  xllm_free(ids);
  CHECK_STATUS(XLLM_STATUS_OK, xllm_model_encode(model, NULL, 0, 0, &ids, &num_ids, &err));
  CHECK(ids == NULL && num_ids == 0);
  const xllm_text invalid = {"a\xff", 2, 0};
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT,
               xllm_model_encode(model, &invalid, 1, 0, &ids, &num_ids, &err));
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT,
               xllm_model_encode(model, NULL, 1, 0, &ids, &num_ids, &err));
  const int32_t outside = 28;
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT,
               xllm_model_decode(model, &outside, 1, 0, &text, &text_size, &err));
  const char *piece = NULL;
  size_t piece_size = 0;
  int32_t type = 0;
  CHECK_STATUS(XLLM_STATUS_OK, xllm_model_token_piece(model, 26, &piece, &piece_size, &type, &err));
  CHECK(piece_size == 10 && type == 3);
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT,
               xllm_model_token_piece(model, -1, &piece, &piece_size, &type, &err));

  xllm_engine *engine = NULL;
  CHECK_STATUS(XLLM_STATUS_MODEL_UNSUPPORTED, xllm_engine_create(model, NULL, &engine, &err));
  CHECK(engine == NULL);
  xllm_plan plan;
  CHECK_STATUS(XLLM_STATUS_MODEL_UNSUPPORTED, xllm_model_plan(model, NULL, &plan, &err));
  xllm_model_close(model);
}

static void test_wrong_arguments(xllm_model *model) {
  xllm_model *other = NULL;
  xllm_engine *engine = NULL;
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT, xllm_model_open(NULL, NULL, &other, &err));
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT, xllm_model_open("x", NULL, NULL, &err));
  CHECK_STATUS(XLLM_STATUS_NOT_FOUND, xllm_model_open("/nonexistent.gguf", NULL, &other, &err));
  CHECK(err.message[0] != '\0' && other == NULL);
  CHECK_STATUS(XLLM_STATUS_NOT_FOUND, xllm_model_open("/nonexistent.gguf", NULL, &other, NULL));

  xllm_engine_config config;
  xllm_engine_config_init(&config);
  config.backend = (xllm_backend)7;
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT, xllm_engine_create(model, &config, &engine, &err));
  CHECK(strcmp(err.details, "field=backend\n") == 0);
  xllm_engine_config_init(&config);
  config.backend = XLLM_BACKEND_CPU;
  config.max_slots = 0;
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT, xllm_engine_create(model, &config, &engine, &err));
  CHECK(strcmp(err.details, "field=max_slots\n") == 0);
  xllm_engine_config_init(&config);
  config.struct_size = 0;
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT, xllm_engine_create(model, &config, &engine, &err));
  config.struct_size = sizeof config + 8;
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT, xllm_engine_create(model, &config, &engine, &err));
  xllm_engine_config_init(&config);
  config.backend = XLLM_BACKEND_CPU;
  config.instruction_set = "abacus";
  CHECK(xllm_engine_create(model, &config, &engine, &err) != XLLM_STATUS_OK);
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT, xllm_engine_create(NULL, NULL, &engine, &err));
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT, xllm_engine_create(model, NULL, NULL, &err));
  CHECK(engine == NULL);

  uint64_t id = 0;
  xllm_events *events = NULL;
  xllm_request request;
  xllm_request_init(&request);
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT, xllm_engine_submit(NULL, &request, &id, &err));
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT, xllm_engine_cancel(NULL, 1, &err));
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT, xllm_engine_take_events(NULL, 0, 0, &events, &err));
  CHECK(xllm_engine_event_fd(NULL) == -1);
  CHECK(xllm_events_count(NULL) == 0 && xllm_events_get(NULL, 0) == NULL);
  xllm_events_destroy(NULL);
  xllm_engine_destroy(NULL);
  xllm_model_close(NULL);
  xllm_engine_drain(NULL);
  xllm_engine_get_stats(NULL, NULL);
  xllm_engine_get_info(NULL, NULL);
  xllm_model_get_info(NULL, NULL);
  xllm_engine_config_init(NULL);
  xllm_request_init(NULL);
}

enum { kVocabSize = 48 }; /* of the model below */

/* One private request to its end; returns how many tokens came. */
static size_t take_answer(xllm_engine *engine, uint64_t id, int32_t *tokens, xllm_event *finished) {
  size_t num_tokens = 0;
  memset(finished, 0, sizeof *finished);
  for (int is_done = 0; !is_done && num_failures == 0;) {
    xllm_events *events = NULL;
    CHECK_STATUS(XLLM_STATUS_OK, xllm_engine_take_events(engine, id, 20, &events, &err));
    CHECK(events != NULL);
    for (size_t i = 0; i < xllm_events_count(events); ++i) {
      const xllm_event *event = xllm_events_get(events, i);
      CHECK(event->request_id == id);
      if (event->kind == XLLM_EVENT_TOKEN) {
        CHECK(event->token_index == num_tokens && event->piece == NULL);
        CHECK(event->num_candidates == 2);
        CHECK(event->candidates[0].token_id == event->token_id);
        CHECK(event->candidates[0].logprob == event->logprob && event->logprob <= 0);
        tokens[num_tokens++] = event->token_id;
      }
      if (event->kind == XLLM_EVENT_FINISHED) {
        *finished = *event;
        finished->text = finished->message = NULL; /* they die with the events */
        is_done = 1;
      }
    }
    xllm_events_destroy(events);
  }
  return num_tokens;
}

static size_t run(xllm_engine *engine, const xllm_request *request, int32_t *tokens,
                  xllm_event *finished) {
  uint64_t id = 0;
  CHECK_STATUS(XLLM_STATUS_OK, xllm_engine_submit(engine, request, &id, &err));
  return take_answer(engine, id, tokens, finished);
}

/* A request that may only choose what each position's mask allows. `request` has num_logprobs 2. */
static void test_masks(xllm_engine *engine, xllm_request request) {
  request.is_constrained = 1;
  request.max_tokens = 2;
  uint64_t id = 0;
  CHECK_STATUS(XLLM_STATUS_OK, xllm_engine_submit(engine, &request, &id, &err));
  const size_t num_words = (kVocabSize + 31) / 32;
  uint32_t words[2][(kVocabSize + 31) / 32];
  memset(words, 0, sizeof words);
  for (int i = 0; i < 2; ++i) words[i][0] = 3u << (5 + i); /* 5 or 6, then 6 or 7 */
  xllm_token_mask masks[2] = {{id, 0, words[0], num_words}, {id, 1, words[1], num_words - 1}};
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT, xllm_engine_push_masks(NULL, masks, 2, &err));
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT, xllm_engine_push_masks(engine, NULL, 2, &err));
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT, xllm_engine_push_masks(engine, masks, 2, &err));
  CHECK(strstr(err.details, "entry=1\n") != NULL);
  masks[1].num_words = num_words;
  masks[1].words = NULL;
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT, xllm_engine_push_masks(engine, masks, 2, &err));
  masks[1].words = words[1];
  masks[1].request_id = 1000;
  CHECK_STATUS(XLLM_STATUS_NOT_FOUND, xllm_engine_push_masks(engine, masks, 2, &err));
  masks[1].request_id = id;
  CHECK_STATUS(XLLM_STATUS_OK, xllm_engine_push_masks(engine, masks, 2, &err));
  CHECK_STATUS(XLLM_STATUS_OK, xllm_engine_push_masks(engine, masks, 0, &err));
  int32_t tokens[64];
  xllm_event finished;
  CHECK(take_answer(engine, id, tokens, &finished) == 2);
  CHECK(tokens[0] == 5 || tokens[0] == 6);
  CHECK(tokens[1] == 6 || tokens[1] == 7);
  CHECK(finished.finish_reason == XLLM_FINISH_MAX_TOKENS);
}

/* Acquire, prefill, decode, renew, release. first: what the engine says to this prompt of 20. */
static void test_slots(xllm_engine *engine, const int32_t *prompt, const int32_t *first) {
  xllm_slot_info slot;
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT, xllm_engine_acquire(engine, NULL, NULL, &err));
  CHECK_STATUS(XLLM_STATUS_OK, xllm_engine_acquire(engine, NULL, &slot, &err));
  CHECK(slot.state == XLLM_SLOT_ACQUIRED && slot.decode_mode == XLLM_DECODE_MODE_BATCHED);
  CHECK(slot.is_acquired == 1 && slot.lease_left_s == 60 && slot.num_blocks == 0);
  const xllm_slot_ref ref = {slot.slot, slot.epoch};
  xllm_acquire_options wanted;
  xllm_acquire_options_init(&wanted);
  wanted.slot = slot.slot;
  CHECK_STATUS(XLLM_STATUS_NO_FREE_SLOT, xllm_engine_acquire(engine, &wanted, &slot, &err));
  wanted.slot = -1;
  wanted.decode_mode = XLLM_DECODE_MODE_PER_SLOT;
  CHECK_STATUS(XLLM_STATUS_DECODE_MODE_MISMATCH, xllm_engine_acquire(engine, &wanted, &slot, &err));
  CHECK(strstr(err.details, "call=xllm_engine_acquire\n") != NULL);

  uint64_t id = 0;
  xllm_event finished;
  int32_t tokens[64];
  xllm_prefill_options fill;
  xllm_prefill_options_init(&fill);
  fill.delivery = XLLM_DELIVERY_PRIVATE;
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT, xllm_engine_prefill(engine, ref, &fill, &id, &err));
  fill.prompt = prompt;
  fill.num_prompt = (size_t)1 << 60;
  CHECK_STATUS(XLLM_STATUS_PROMPT_TOO_LONG, xllm_engine_prefill(engine, ref, &fill, &id, &err));
  fill.num_prompt = 20;
  CHECK_STATUS(XLLM_STATUS_OK, xllm_engine_prefill(engine, ref, &fill, &id, &err));
  CHECK(take_answer(engine, id, tokens, &finished) == 0);
  CHECK(finished.status == XLLM_STATUS_OK && finished.finish_reason == XLLM_FINISH_PREFILLED);
  CHECK(finished.num_prompt_tokens == 20 && finished.num_generated_tokens == 0);

  xllm_sampling_params greedy;
  xllm_sampling_params_init(&greedy);
  float logits[48];
  CHECK_STATUS(XLLM_STATUS_DECODE_MODE_MISMATCH,
               xllm_engine_decode_step_slot(engine, ref, &greedy, tokens, NULL, &err));
  CHECK_STATUS(XLLM_STATUS_OK,
               xllm_engine_decode_step_batch(engine, &ref, &greedy, 1, tokens, logits, &err));
  CHECK(tokens[0] == first[0]);
  int best = 0;
  for (int i = 1; i < 48; ++i) best = logits[i] > logits[best] ? i : best;
  CHECK(best == first[0]);
  xllm_request how;
  xllm_request_init(&how);
  how.delivery = XLLM_DELIVERY_PRIVATE;
  how.max_tokens = 4;
  how.num_logprobs = 2;
  how.ignore_eos = 1;
  CHECK_STATUS(XLLM_STATUS_DECODE_MODE_MISMATCH,
               xllm_engine_decode_slot(engine, ref, &how, &id, &err));
  CHECK(strstr(err.details, "slot_mode=BATCHED\n") != NULL);
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT,
               xllm_engine_decode_batch(engine, &ref, &how, 0, &id, &err));
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT,
               xllm_engine_decode_batch(engine, &ref, &how, (size_t)1 << 60, &id, &err));
  CHECK_STATUS(XLLM_STATUS_OK, xllm_engine_decode_batch(engine, &ref, &how, 1, &id, &err));
  CHECK(take_answer(engine, id, tokens, &finished) == 4);
  CHECK(memcmp(tokens, first + 1, 4 * sizeof first[0]) == 0);
  CHECK(xllm_engine_get_slot(engine, ref.slot, &slot) == 1);
  CHECK(slot.state == XLLM_SLOT_READY && slot.num_tokens == 25 && slot.num_blocks == 2);
  CHECK_STATUS(XLLM_STATUS_OK, xllm_engine_renew(engine, ref, 5, &slot, &err));
  CHECK(slot.lease_left_s == 5);
  const xllm_slot_ref stale = {ref.slot, ref.epoch - 1};
  CHECK_STATUS(XLLM_STATUS_STALE_EPOCH, xllm_engine_renew(engine, stale, 5, NULL, &err));
  CHECK_STATUS(XLLM_STATUS_OK, xllm_engine_release(engine, ref, NULL, &err));
  CHECK_STATUS(XLLM_STATUS_STALE_EPOCH, xllm_engine_release(engine, ref, NULL, &err));
}

static void test_engine(xllm_model *model) {
  xllm_engine_config config;
  xllm_engine_config_init(&config);
  config.backend = XLLM_BACKEND_CPU;
  config.decode_mode = XLLM_DECODE_MODE_BATCHED;
  config.num_threads = 1;
  config.max_slots = 2;
  config.max_queue = 0;
  config.block_size = 16;
  config.kv_memory = 1 << 20;
  config.max_seq_len = 64;

  xllm_plan plan;
  CHECK_STATUS(XLLM_STATUS_OK, xllm_model_plan(model, &config, &plan, &err));
  CHECK(plan.fits == 1 && plan.kv_num_blocks > 0 && plan.block_size == 16);
  CHECK(plan.kv_pool_bytes <= config.kv_memory);
  CHECK(plan.kv_bytes_per_token * 16 * plan.kv_num_blocks == plan.kv_pool_bytes);

  xllm_engine *engine = NULL;
  CHECK_STATUS(XLLM_STATUS_OK, xllm_engine_create(model, &config, &engine, &err));
  if (engine == NULL) return;
  xllm_engine_info info;
  xllm_engine_get_info(engine, &info);
  CHECK(strcmp(info.device_kind, "cpu") == 0 && info.num_threads == 1);
  CHECK(info.max_slots == 2 && info.max_seq_len == 64 && info.block_size == 16);
  CHECK(info.decode_mode == XLLM_DECODE_MODE_BATCHED);

  int32_t prompt[20];
  for (int i = 0; i < 20; ++i) prompt[i] = i;
  int32_t first[64], again[64];
  xllm_event finished;
  xllm_request request;
  xllm_request_init(&request);
  request.prompt = prompt;
  request.num_prompt = 20;
  request.delivery = XLLM_DELIVERY_PRIVATE;
  request.max_tokens = 10;
  request.ignore_eos = 1;
  request.num_logprobs = 2;
  CHECK(run(engine, &request, first, &finished) == 10);
  CHECK(finished.status == XLLM_STATUS_OK && finished.finish_reason == XLLM_FINISH_MAX_TOKENS);
  CHECK(finished.num_generated_tokens == 10 && finished.num_prompt_tokens == 20);
  CHECK(finished.matched_token_id == -1 && finished.matched_stop == -1);
  CHECK(finished.ttft_s > 0);
  CHECK(run(engine, &request, again, &finished) == 10);
  CHECK(memcmp(first, again, 10 * sizeof first[0]) == 0);
  CHECK(finished.num_cached_tokens == 16);
  request.max_tokens = 0;
  CHECK(run(engine, &request, again, &finished) == 44);
  CHECK(finished.finish_reason == XLLM_FINISH_CONTEXT_FULL);

  /* Wrong requests change nothing. */
  uint64_t id = 77;
  xllm_request wrong = request;
  wrong.prompt = NULL;
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT, xllm_engine_submit(engine, &wrong, &id, &err));
  wrong = request;
  wrong.num_prompt = (size_t)1 << 60;
  CHECK_STATUS(XLLM_STATUS_PROMPT_TOO_LONG, xllm_engine_submit(engine, &wrong, &id, &err));
  CHECK(strstr(err.details, "limit=63\n") != NULL);
  wrong = request;
  wrong.num_stop_token_ids = (size_t)1 << 60;
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT, xllm_engine_submit(engine, &wrong, &id, &err));
  wrong = request;
  wrong.sampling.temperature = NAN;
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT, xllm_engine_submit(engine, &wrong, &id, &err));
  CHECK(strcmp(err.details, "field=temperature\n") == 0);
  wrong = request;
  wrong.delivery = (xllm_delivery)2;
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT, xllm_engine_submit(engine, &wrong, &id, &err));
  wrong = request;
  wrong.decode_mode = XLLM_DECODE_MODE_PER_SLOT;
  CHECK_STATUS(XLLM_STATUS_DECODE_MODE_MISMATCH, xllm_engine_submit(engine, &wrong, &id, &err));
  CHECK(strstr(err.details, "engine_mode=BATCHED\nrequested_mode=PER_SLOT\n") == err.details);
  wrong = request;
  const xllm_text stop = {"x", 1, 0};
  wrong.stop_strings = &stop;
  wrong.num_stop_strings = 1;
  CHECK_STATUS(XLLM_STATUS_NO_TOKENIZER, xllm_engine_submit(engine, &wrong, &id, &err));
  const xllm_text long_stop = {"x", 1000, 0}; /* refused by its size, before it is read */
  wrong.stop_strings = &long_stop;
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT, xllm_engine_submit(engine, &wrong, &id, &err));
  CHECK(strcmp(err.details, "field=stop_strings[0]\n") == 0);
  CHECK(strstr(err.message, "expected 1 to 256 bytes, found 1000") != NULL);
  CHECK(id == 77);
  uint64_t ids[3] = {77, 77, 77}; /* more than max_slots 2 and max_queue 0 ever have places for */
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT,
               xllm_engine_submit_outputs(engine, &request, 3, ids, &err));
  CHECK(strcmp(err.details, "field=num_outputs\n") == 0);
  CHECK(strstr(err.message, "max_slots + max_queue, 2, found 3") != NULL);
  CHECK(ids[0] == 77);
  CHECK_STATUS(XLLM_STATUS_NOT_FOUND, xllm_engine_cancel(engine, 1000, &err));
  test_masks(engine, request);
  xllm_events *events = NULL;
  CHECK_STATUS(XLLM_STATUS_NOT_FOUND, xllm_engine_take_events(engine, 1000, 0, &events, &err));
  CHECK_STATUS(XLLM_STATUS_INVALID_ARGUMENT,
               xllm_engine_take_events(engine, 0, NAN, &events, &err));

  /* Shared events come by the descriptor. */
  request.delivery = XLLM_DELIVERY_SHARED;
  request.max_tokens = 3;
  CHECK_STATUS(XLLM_STATUS_OK, xllm_engine_submit(engine, &request, &id, &err));
  int is_done = 0;
  while (!is_done && num_failures == 0) {
    struct pollfd poll_fd = {xllm_engine_event_fd(engine), POLLIN, 0};
    CHECK(poll(&poll_fd, 1, 20000) == 1);
    CHECK_STATUS(XLLM_STATUS_OK, xllm_engine_take_events(engine, 0, 0, &events, &err));
    for (size_t i = 0; i < xllm_events_count(events); ++i) {
      is_done |= xllm_events_get(events, i)->kind == XLLM_EVENT_FINISHED;
    }
    xllm_events_destroy(events);
  }

  xllm_engine_stats stats;
  xllm_engine_get_stats(engine, &stats);
  CHECK(stats.num_requests_finished == 5 && stats.blocks_used == 0 && stats.slots_used == 0);
  CHECK(stats.num_generated_tokens == 10 + 10 + 44 + 2 + 3);
  CHECK(stats.blocks_total == plan.kv_num_blocks && stats.slots_total == 2);
  xllm_slot_info slot;
  CHECK(xllm_engine_get_slot(engine, 0, &slot) == 1 && slot.state == XLLM_SLOT_FREE);
  CHECK(slot.epoch == 5);
  CHECK(xllm_engine_get_slot(engine, 2, &slot) == 0);
  test_slots(engine, prompt, first);
  xllm_engine_drain(engine);
  CHECK_STATUS(XLLM_STATUS_DRAINING, xllm_engine_submit(engine, &request, &id, &err));
  xllm_engine_destroy(engine);
}

/* An engine keeps what it needs of its model. */
static void test_engine_outlives_its_model(const char *path) {
  xllm_model *model = NULL;
  xllm_engine *engine = NULL;
  CHECK_STATUS(XLLM_STATUS_OK, xllm_model_open(path, NULL, &model, &err));
  xllm_engine_config config;
  xllm_engine_config_init(&config);
  config.backend = XLLM_BACKEND_CPU;
  config.kv_memory = 1 << 20;
  CHECK_STATUS(XLLM_STATUS_OK, xllm_engine_create(model, &config, &engine, &err));
  xllm_model_close(model);
  int32_t prompt[3] = {1, 2, 3}, tokens[64];
  xllm_event finished;
  xllm_request request;
  xllm_request_init(&request);
  request.prompt = prompt;
  request.num_prompt = 3;
  request.delivery = XLLM_DELIVERY_PRIVATE;
  request.max_tokens = 5;
  request.ignore_eos = 1;
  request.num_logprobs = 2;
  if (engine != NULL) CHECK(run(engine, &request, tokens, &finished) == 5);
  xllm_engine_destroy(engine);
}

int main(void) {
  char path[4096];
  data_path("llama.gguf", path, sizeof path);
  xllm_model *model = NULL;
  test_library();
  test_vocabulary();
  CHECK_STATUS(XLLM_STATUS_OK, xllm_model_open(path, NULL, &model, &err));
  if (model != NULL) {
    xllm_model_info info;
    xllm_model_get_info(model, &info);
    CHECK(info.has_weights == 1 && info.vocab_size == kVocabSize && info.has_tokenizer == 0);
    xllm_tensor_info tensor;
    CHECK(xllm_model_get_tensor(model, 0, &tensor) == 1 && tensor.size_bytes > 0);
    xllm_fact fact;
    CHECK(xllm_model_get_fact(model, 0, &fact) == 1);
    test_wrong_arguments(model);
    test_engine(model);
    xllm_model_close(model);
  }
  test_engine_outlives_its_model(path);
  if (num_failures == 0) puts("capi_test: ok");
  return num_failures == 0 ? 0 : 1;
}

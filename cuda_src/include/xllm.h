/* xLLM: run GGUF language models from their quantised blocks.
 *
 * This is the only public header of the core, and its manual. It is C11 and C++17.
 *
 * Overview
 *   xllm_model   an opened GGUF file: metadata, tensors, tokenizer. Opening maps the file and loads
 *                no weights.
 *   xllm_engine  one model on one device: weights, KV pool, and a thread of its own that runs the
 *                step loop. Requests go in with xllm_engine_submit; events come out with
 *                xllm_engine_take_events.
 *   A process may hold any number of models and engines; they share nothing but the machine.
 *
 *     xllm_model *model = NULL;
 *     xllm_engine *engine = NULL;
 *     xllm_error err;
 *     if (xllm_model_open("model.gguf", NULL, &model, &err) != XLLM_STATUS_OK) {
 *       puts(err.message);
 *       return 1;
 *     }
 *     xllm_engine_config config;
 *     xllm_engine_config_init(&config);
 *     if (xllm_engine_create(model, &config, &engine, &err) != XLLM_STATUS_OK) ...
 *
 * Errors
 *   Functions that can fail return xllm_status and, when `err` is not NULL, describe the failure
 *   there: one line of text that names the thing, what was expected and what was found, and details
 *   for programs. On failure nothing is changed, unless the function says otherwise. No function
 *   throws, exits or aborts. Null for a required pointer is INVALID_ARGUMENT.
 *
 * Ownership
 *   *_open / *_create give an object to the caller; the matching *_close / *_destroy takes it back
 *   (NULL is allowed). An engine keeps what it needs of its model, so the two may go in either
 *   order. `const char *` results belong to the object they came from and live as long as it does.
 *   Memory returned through `out_*` pointers that say so is released with xllm_free. Text is UTF-8
 *   and is passed with a length; a NUL byte in it is an ordinary byte.
 *
 * Threads
 *   Every function may be called from any thread, except that close / destroy must be the last call
 *   on its object. No function waits for the device except those that say so (create, destroy,
 *   take_events with a timeout, the decode steps).
 *
 * Versioning
 *   Structs that callers fill begin with struct_size, set by their *_init function; fields are only
 *   ever appended. Enum values keep their numbers. XLLM_ABI_VERSION rises when a caller must be
 *   recompiled.
 */
#ifndef XLLM_H_
#define XLLM_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define XLLM_API __attribute__((visibility("default")))
#else
#define XLLM_API
#endif

#define XLLM_ABI_VERSION 3

/* ------------------------------------------------------------------ status */

/* One value for each reason that a caller can act on. */
typedef enum xllm_status {
  XLLM_STATUS_OK = 0,
  XLLM_STATUS_INVALID_ARGUMENT = 1, /* a field is wrong; detail "field" names it */
  /* The prompt leaves no room in max_seq_len; details num_tokens, limit. */
  XLLM_STATUS_PROMPT_TOO_LONG = 2,
  /* Would not fit an empty KV pool; details blocks_needed, blocks_total. */
  XLLM_STATUS_NEVER_FITS = 3,
  XLLM_STATUS_NOT_FOUND = 4, /* file, request or slot unknown */
  XLLM_STATUS_ALREADY_EXISTS = 5,
  XLLM_STATUS_DECODE_MODE_MISMATCH = 6, /* details engine_mode, requested_mode, call, remedy */
  XLLM_STATUS_SLOT_STATE = 7,           /* call not allowed in the slot's state */
  XLLM_STATUS_NO_TOKENIZER = 8,         /* token ids work, text does not */
  XLLM_STATUS_NO_CHAT_TEMPLATE = 9,
  XLLM_STATUS_QUEUE_FULL = 10,    /* nothing was queued; retry later */
  XLLM_STATUS_QUEUE_TIMEOUT = 11, /* waited longer than max_queue_s */
  XLLM_STATUS_NO_FREE_SLOT = 12,
  /* An answer has outgrown the whole KV pool, or a slot what others leave of it. */
  XLLM_STATUS_KV_EXHAUSTED = 13,
  XLLM_STATUS_MEMORY = 14,      /* does not fit; details bytes_needed, bytes_free, remedy */
  XLLM_STATUS_STALE_EPOCH = 15, /* the slot changed hands, or was released */
  /* The lease ran out, or the slot was released under a running call. */
  XLLM_STATUS_LEASE_LOST = 16,
  XLLM_STATUS_PERMISSION_DENIED = 17, /* another owner's slot */
  XLLM_STATUS_CANCELLED = 18,
  XLLM_STATUS_DEADLINE_EXCEEDED = 19,
  XLLM_STATUS_MODEL_MALFORMED = 20, /* the file contradicts its format */
  XLLM_STATUS_MODEL_TRUNCATED = 21, /* the file ends early */
  /* Version, architecture, tensor type or tokenizer unknown. */
  XLLM_STATUS_MODEL_UNSUPPORTED = 22,
  XLLM_STATUS_UNIMPLEMENTED = 23, /* this build, device or model lacks it */
  /* A row of logits held NaN or infinity; that request ended. */
  XLLM_STATUS_NON_FINITE_LOGITS = 24,
  XLLM_STATUS_DEVICE = 25, /* driver or device fault */
  /* The step loop has stopped; destroy the engine and create another. */
  XLLM_STATUS_ENGINE_FAILED = 26,
  XLLM_STATUS_DRAINING = 27, /* no new work */
  XLLM_STATUS_IO = 28,       /* the operating system refused */
  XLLM_STATUS_INTERNAL = 29, /* a broken invariant of this library */
  /* Refused before it began: max_duration_s would be over first; details estimated_wait_s,
   * max_duration_s. */
  XLLM_STATUS_DEADLINE_UNREACHABLE = 30
} xllm_status;

/* Where a failure is described. Caller-owned; no initialisation needed. Strings are NUL-terminated
 * and cut to their arrays. */
typedef struct xllm_error {
  xllm_status status;
  char message[1024];
  char details[2048]; /* lines "key=value\n" */
} xllm_error;

/* "DECODE_MODE_MISMATCH" for XLLM_STATUS_DECODE_MODE_MISMATCH; "UNKNOWN" for a number outside the
 * enum. */
XLLM_API const char *xllm_status_name(xllm_status status);

/* "0.1.0", the ABI number the library was built with, and the hash of its sources. */
XLLM_API const char *xllm_version(void);
XLLM_API int xllm_abi_version(void);
XLLM_API const char *xllm_build_id(void);

/* Releases memory that an out_ parameter handed over; NULL is allowed. */
XLLM_API void xllm_free(void *memory);

/* ------------------------------------------------------------------ choices */

/* Which of the two ways to decode. The same numbers in C, Cython and protobuf.
 *   BATCHED   raw quantised weights, integer kernels, continuous batching (xllm_engine_submit)
 *   PER_SLOT  weights dequantised to f32, one slot at a time: the accuracy reference
 *   AUTO      of an engine: each set of weights is loaded on first use; of a request: what the
 *             engine's mode implies
 * An engine in one mode refuses requests in the other with DECODE_MODE_MISMATCH; nothing is ever
 * downgraded. */
typedef enum xllm_decode_mode {
  XLLM_DECODE_MODE_AUTO = 0,
  XLLM_DECODE_MODE_BATCHED = 1,
  XLLM_DECODE_MODE_PER_SLOT = 2
} xllm_decode_mode;

typedef enum xllm_backend {
  XLLM_BACKEND_AUTO = 0, /* CUDA where there is a usable device, else the CPU */
  XLLM_BACKEND_CPU = 1,
  XLLM_BACKEND_CUDA = 2
} xllm_backend;

/* How keys and values are stored: f16; int8 or int4 with an f16 scale per token and 32 channels. */
typedef enum xllm_kv_type {
  XLLM_KV_TYPE_F16 = 0,
  XLLM_KV_TYPE_INT8 = 1,
  XLLM_KV_TYPE_INT4 = 2
} xllm_kv_type;

/* Receives one line of notice (no newline). Called from any thread of the library, possibly several
 * at once. */
typedef void (*xllm_log_fn)(void *user, const char *line);

/* ------------------------------------------------------------------ model */

typedef struct xllm_model xllm_model;

typedef struct xllm_model_options {
  size_t struct_size;
  /* Overrides tokenizer.ggml.pre, or stands in where the file lacks it; NULL: the file decides. */
  const char *pretokenizer;
} xllm_model_options;

XLLM_API void xllm_model_options_init(xllm_model_options *options);

/* Map the GGUF file at `path` (the first shard of a split one) and read everything but the weights.
 *   options   NULL: defaults
 * A file whose tensors or architecture are unknown is refused; one that holds only a vocabulary
 * opens, and engines on it are refused. NOT_FOUND, IO, MODEL_MALFORMED, MODEL_TRUNCATED,
 * MODEL_UNSUPPORTED; the message names the key or tensor and the byte offset. */
XLLM_API xllm_status xllm_model_open(const char *path, const xllm_model_options *options,
                                     xllm_model **out_model, xllm_error *err);
XLLM_API void xllm_model_close(xllm_model *model);

typedef struct xllm_model_info {
  const char *architecture; /* "llama" */
  const char *name;         /* general.name, or "" */
  const char *path;
  uint64_t file_bytes; /* all shards */
  uint64_t num_params;
  int32_t has_weights; /* 0: a file that holds only a vocabulary */
  int32_t num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim;
  int32_t vocab_size;          /* rows of the head */
  int32_t num_real_tokens;     /* ids that can be chosen; the rest is padding */
  int32_t context_length;      /* the model's own */
  const char *tokenizer_model; /* "gpt2", "llama", "no_vocab" */
  const char *pretokenizer;    /* "smollm"; "" where there is none */
  int32_t has_tokenizer;       /* 0: text calls give NO_TOKENIZER */
  int32_t bos_token_id;        /* -1: none */
  int32_t add_bos;             /* 1: encoding with special tokens puts it first */
  const char *chat_template;   /* Jinja text, "" where the file has none */
  size_t chat_template_size;
} xllm_model_info;

XLLM_API void xllm_model_get_info(const xllm_model *model, xllm_model_info *out_info);

/* Lists of a model. `index` counts from 0; an index past the end returns 0 and leaves *out alone,
 * otherwise 1. */
typedef struct xllm_metadata {
  const char *key;
  const char *type; /* "uint32", "string", "array of string" */
  /* JSON text; an array of more than 16 elements shows the first 16 and ends in "..." as its
   * last element. */
  const char *value_json;
} xllm_metadata;
typedef struct xllm_tensor_info {
  const char *name;
  const char *dtype; /* "q4_1" */
  int32_t num_dims;
  uint64_t dims[4]; /* GGUF order: dims[0] is the length of a row */
  uint64_t size_bytes;
  uint64_t file_offset;
} xllm_tensor_info;
/* Something that was inferred or chosen while reading the file, and from what. */
typedef struct xllm_fact {
  const char *name;   /* "rope_pairing" */
  const char *value;  /* "neighbours" */
  const char *source; /* "architecture llama" */
} xllm_fact;
/* A member of the one end-of-generation set that serves every feature that ends or forbids ending.
 */
typedef struct xllm_end_token {
  int32_t token_id;
  const char *text;
  const char *source; /* "tokenizer.ggml.eos_token_id", "known name", "chat template" */
} xllm_end_token;
XLLM_API int xllm_model_get_metadata(const xllm_model *model, size_t index, xllm_metadata *out);
XLLM_API int xllm_model_get_tensor(const xllm_model *model, size_t index, xllm_tensor_info *out);
XLLM_API int xllm_model_get_fact(const xllm_model *model, size_t index, xllm_fact *out);
XLLM_API int xllm_model_get_end_token(const xllm_model *model, size_t index, xllm_end_token *out);

/* A piece of text to encode. In a `trusted` piece (1, template text) the written form of a CONTROL
 * token becomes that token; in any other (0) it stays plain text. -1: the piece is part of no
 * special token of any kind, USER_DEFINED ones included. */
typedef struct xllm_text {
  const char *data;
  size_t size;
  int32_t trusted;
} xllm_text;

/* Encode pieces of text that follow one another.
 *   add_special   1: BOS / EOS as the vocabulary asks for; BOS exactly once even where the text
 *                 already begins with it
 *   out_ids       num ids, released with xllm_free; set to NULL when there are none
 * NO_TOKENIZER; INVALID_ARGUMENT: invalid UTF-8 (the message gives the byte offset). Takes O(n log
 * n) in the size of the text. */
XLLM_API xllm_status xllm_model_encode(const xllm_model *model, const xllm_text *texts,
                                       size_t num_texts, int add_special, int32_t **out_ids,
                                       size_t *out_num, xllm_error *err);

/* The text of a sequence of ids: whole code points; bytes that form none become U+FFFD. CONTROL
 * tokens give no text unless render_special. out_text (out_size bytes, and a NUL after them) is
 * released with xllm_free.
 * NO_TOKENIZER; INVALID_ARGUMENT: an id outside the vocabulary, with its index. */
XLLM_API xllm_status xllm_model_decode(const xllm_model *model, const int32_t *ids, size_t num_ids,
                                       int render_special, char **out_text, size_t *out_size,
                                       xllm_error *err);

/* The raw bytes of one token (not always whole code points). The token's type goes to *out_type,
 * numbers of tokenizer.ggml.token_type. NO_TOKENIZER; INVALID_ARGUMENT: an id outside the
 * vocabulary. */
XLLM_API xllm_status xllm_model_token_piece(const xllm_model *model, int32_t id,
                                            const char **out_bytes, size_t *out_size,
                                            int32_t *out_type, xllm_error *err);

/* ------------------------------------------------------------------ engine */

typedef struct xllm_engine xllm_engine;

typedef struct xllm_engine_config {
  size_t struct_size;
  xllm_backend backend;         /* AUTO */
  xllm_decode_mode decode_mode; /* BATCHED */
  xllm_kv_type kv_type;         /* F16 */
  int32_t max_slots;            /* 8; requests decoding at once, 1 to 1024 */
  /* 0: the model's context length; tokens of prompt and answer together. */
  int32_t max_seq_len;
  int32_t allow_long_context; /* 0; 1: max_seq_len may exceed the model's context length */
  int32_t prefill_chunk;      /* 512; prompt tokens computed per step at most, 1 to 8192 */
  int32_t block_size;         /* 64; token positions per KV block: 16, 32, 64 or 128 */
  /* 256; requests beyond max_slots that may wait before QUEUE_FULL, 0 to 1048576. */
  int32_t max_queue;
  int32_t num_threads;  /* 0: min(affinity, cgroup quota, physical cores); CPU backend */
  int32_t device_index; /* 0; CUDA backend */
  /* 0: auto: 0.90 x device memory - weights - scratch; on the CPU 25 % of what the cgroup
   * grants. */
  uint64_t kv_memory;
  uint64_t memory_limit; /* 0: none; bytes this engine may take on its device */
  /* NULL: best; "scalar", "avx2", "avx512", "neon": refused where the CPU lacks it. */
  const char *instruction_set;
  xllm_log_fn log; /* NULL: silent */
  void *log_user;
  /* 0.2; seconds between two tokens of a stream at most, up to 3600, 0: no bound. Beside streams
   * that decode, prompts are computed in pieces that fit into it, by what steps have taken so far:
   * a goal, not a guarantee. Without such streams prefill_chunk alone counts. */
  double max_token_gap_s;
} xllm_engine_config;

XLLM_API void xllm_engine_config_init(xllm_engine_config *config);

/* What an engine would take, in bytes, before anything is loaded. */
typedef struct xllm_plan {
  uint64_t raw_weight_bytes;         /* the batched set: memory of its own on the device */
  uint64_t dequantized_weight_bytes; /* the per-slot set */
  uint64_t mapped_bytes;             /* of the file, used in place */
  uint64_t kv_bytes_per_token;
  uint64_t kv_pool_bytes;
  uint64_t kv_num_blocks;
  uint64_t scratch_bytes;
  uint64_t table_bytes;        /* RoPE; on the CPU the vocabulary too */
  uint64_t total_bytes;        /* for the configured mode */
  uint64_t device_total_bytes; /* or the memory_limit */
  uint64_t device_free_bytes;
  int32_t block_size;
  int32_t fits;
} xllm_plan;

/* The Plan of `config` on this machine. NULL config: defaults. INVALID_ARGUMENT as for
 * xllm_engine_create; MODEL_UNSUPPORTED: the file holds only a vocabulary. A plan that does not fit
 * is a result (fits = 0), no error. */
XLLM_API xllm_status xllm_model_plan(const xllm_model *model, const xllm_engine_config *config,
                                     xllm_plan *out_plan, xllm_error *err);

/* Load the weights that the mode asks for, set up the KV pool, start the step loop. Waits for all
 * of it. INVALID_ARGUMENT: a config field out of range, or max_seq_len beyond the model's context.
 * MEMORY: the Plan does not fit; details bytes_needed, bytes_free, remedy; nothing stays allocated.
 * UNIMPLEMENTED: mode or KV type not offered by the backend. DEVICE: CUDA asked for and not usable,
 * with the reason. MODEL_UNSUPPORTED: no weights. */
XLLM_API xllm_status xllm_engine_create(xllm_model *model, const xllm_engine_config *config,
                                        xllm_engine **out_engine, xllm_error *err);

/* Stop the step loop (at most one step is waited for), end every live request as CANCELLED without
 * an event, free everything. Threads waiting in take_events return ENGINE_FAILED first. */
XLLM_API void xllm_engine_destroy(xllm_engine *engine);

typedef struct xllm_engine_info {
  const char *device_kind; /* "cpu", "cuda" */
  const char *device_name;
  const char *kernels; /* "avx2", "sm_90a" */
  int32_t num_threads;
  const char *threads_limit; /* which limit decided num_threads */
  xllm_decode_mode decode_mode;
  xllm_kv_type kv_type;
  int32_t max_slots, max_seq_len, prefill_chunk, block_size, max_queue;
  xllm_plan plan; /* as of creation */
  double load_s;  /* seconds that creation took */
} xllm_engine_info;

XLLM_API void xllm_engine_get_info(const xllm_engine *engine, xllm_engine_info *out_info);

/* ------------------------------------------------------------------ requests */

/* How a token is chosen. xllm_sampling_params_init sets the neutral value of each field, which is
 * also its default: greedy. The order is one and the same everywhere: logit bias, repetition
 * penalty, frequency and presence penalty, temperature, top_k, top_p, min_p, draw. Fields outside
 * their range are INVALID_ARGUMENT. */
typedef struct xllm_sampling_params {
  /* 0: the largest logit, lowest id on a tie, no random draw; else finite, > 0 up to 100. */
  float temperature;
  int32_t top_k; /* 0 or >= vocabulary: off; else the k largest */
  /* 1: off; 0: one token; smallest set whose probability sums to it, [0, 1]. */
  float top_p;
  /* 0: off; 1: only ties of the best; drop what is below min_p x the best probability, [0, 1]. */
  float min_p;
  /* 1: off; (0, 100]; tokens of the prompt and the answer: positive logits divided, negative
   * multiplied. */
  float repetition_penalty;
  /* 0: off; [-100, 100]; x occurrences among generated tokens, subtracted. */
  float frequency_penalty;
  float presence_penalty; /* 0: off; [-100, 100]; subtracted once from generated tokens */
  int32_t has_seed;       /* 0: a seed is drawn and echoed */
  uint64_t seed;
} xllm_sampling_params;

XLLM_API void xllm_sampling_params_init(xllm_sampling_params *params);

typedef struct xllm_logit_bias {
  int32_t token_id;
  float bias; /* added to the logit; -infinity forbids; +infinity and NaN are refused */
} xllm_logit_bias;

/* Who takes a request's events: whoever drains the engine's common queue (request_id 0), or only
 * calls that name the request. */
typedef enum xllm_delivery { XLLM_DELIVERY_SHARED = 0, XLLM_DELIVERY_PRIVATE = 1 } xllm_delivery;

/* How a prompt uses the prefix cache. */
typedef struct xllm_cache_options {
  /* Bytes, at most 4096; copied. Only prompts of equal salt share blocks, or can tell from counts
   * or times that they would. NULL and 0: the empty salt. */
  const char *salt;
  size_t salt_size;
  int32_t bypass; /* 0; 1: nothing is looked up, and nothing stays behind for others */
} xllm_cache_options;

typedef struct xllm_request {
  size_t struct_size;
  const int32_t *prompt; /* num_prompt ids in [0, vocab_size), at least 1 */
  size_t num_prompt;
  xllm_decode_mode decode_mode; /* AUTO */
  xllm_delivery delivery;       /* SHARED */
  xllm_sampling_params sampling;
  uint32_t max_tokens; /* 0: as many as max_seq_len leaves room for */
  /* 0; before it, ends of generation and stop token ids are forbidden and stop strings not
   * looked for. A mask that leaves nothing but these ends the request: see xllm_token_mask. */
  uint32_t min_tokens;
  int32_t ignore_eos; /* 0; 1: the end-of-generation set does not end the answer */
  /* -1: none; 0..20: the chosen token's and so many best candidates'. */
  int32_t num_logprobs;
  /* At most 16, each 1..256 bytes; matched in the text, never sent. */
  const xllm_text *stop_strings;
  size_t num_stop_strings;
  const int32_t *stop_token_ids; /* at most 64 */
  size_t num_stop_token_ids;
  const xllm_logit_bias *logit_biases; /* at most 1024, ids unique */
  size_t num_logit_biases;
  int32_t priority;       /* 0; larger goes first */
  double max_queue_s;     /* 0: no limit; seconds to wait for a slot, then QUEUE_TIMEOUT */
  double max_duration_s;  /* 0: no limit; seconds from submission, then DEADLINE_EXCEEDED */
  int32_t is_constrained; /* 0; 1: each token waits for its mask, see xllm_engine_push_masks */
  xllm_cache_options cache;
  /* 0; whose request it is, by a number of the caller's choice. Among waiting requests of one
   * priority, tenants take turns. */
  uint64_t tenant;
} xllm_request;

XLLM_API void xllm_request_init(xllm_request *request);

/* Queue one request. Thread-safe; never waits for the device. Everything that `request` points to
 * is copied.
 *   out_id   > 0, unique within the engine; set only on OK
 * INVALID_ARGUMENT: a field out of range (detail "field"). PROMPT_TOO_LONG: no room for one token
 * in max_seq_len. NEVER_FITS: the prompt and one token exceed the whole KV pool.
 * DECODE_MODE_MISMATCH. QUEUE_FULL: nothing was queued. DRAINING, ENGINE_FAILED. NO_TOKENIZER: stop
 * strings without a vocabulary. DEADLINE_UNREACHABLE: by what steps have taken so far, the prompt
 * would be computed in more than twice max_duration_s. Of an AUTO engine also MEMORY: the set of
 * weights that this request would load does not fit beside the other (details bytes_needed,
 * bytes_free, remedy); and UNIMPLEMENTED: the backend lacks this mode. */
XLLM_API xllm_status xllm_engine_submit(xllm_engine *engine, const xllm_request *request,
                                        uint64_t *out_id, xllm_error *err);

/* Queue several outputs of one request: each is a request of its own, with its own id, seat, events
 * and end. The prompt is computed once: the others wait for the first one to have it, and share its
 * KV blocks; their num_cached_tokens says so. Where the first one ends before they have their
 * seats, they take what the prefix cache has of it.
 *   - num_outputs   1 to 128, and at most max_slots + max_queue; all are queued, or none
 *   - out_ids       [num_outputs]; output i draws with the seed of the request, or the one drawn,
 *                   plus i (modulo 2^64), echoed in its ACCEPTED event
 * Errors as for xllm_engine_submit; INVALID_ARGUMENT for such a num_outputs. */
XLLM_API xllm_status xllm_engine_submit_outputs(xllm_engine *engine, const xllm_request *request,
                                                size_t num_outputs, uint64_t *out_ids,
                                                xllm_error *err);

/* How many leading tokens of a prompt would be taken from the prefix cache if it were submitted
 * now, at most num_prompt - 1. Computes and changes nothing, and never waits for the step loop. By
 * the time of a submission they may be gone. decode_mode   as of a request; each mode has a pool
 * and a cache of its own cache         NULL: the empty salt INVALID_ARGUMENT, PROMPT_TOO_LONG,
 * DECODE_MODE_MISMATCH. */
XLLM_API xllm_status xllm_engine_count_cached(const xllm_engine *engine, const int32_t *prompt,
                                              size_t num_prompt, xllm_decode_mode decode_mode,
                                              const xllm_cache_options *cache, uint32_t *out_num,
                                              xllm_error *err);

/* End a request, wherever it is: its slot and blocks are free within one step, and a FINISHED event
 * with status CANCELLED follows. Calling it again, or for a request that has ended, is harmless.
 * NOT_FOUND: the id was never given out. */
XLLM_API xllm_status xllm_engine_cancel(xllm_engine *engine, uint64_t request_id, xllm_error *err);

/* ------------------------------------------------------------------ masks */

/* Which tokens a constrained request may choose at one position: the core's half of structured
 * output. Whoever knows the grammar computes the masks, anywhere and in any thread:
 *
 *   submit with is_constrained; push the mask of token_index 0, before or after ACCEPTED
 *   on each TOKEN event with wants_mask: push the mask of token_index + 1
 *
 * A mask has the time of the next step: the request takes part in it, and its token is chosen if
 * the mask comes before the step's rows are computed or soon after. Else the request sits steps
 * out, with its seat and its blocks, while the others go on, and the position is computed again
 * once its mask is there: when masks come changes no token. Nothing but max_duration_s, cancel and
 * the end of a lease ends a request that waits for a mask for good.
 *
 * A mask is the last word on which tokens there are: what it leaves out is never chosen, greedy or
 * drawn, has no logprob and no weight in any sum; ends of generation and stop tokens are allowed as
 * it says, and end the answer as ever. logit_biases, penalties and min_tokens apply within it. When
 * they and the mask leave no token, the request ends as INVALID_ARGUMENT. Ids that are no tokens
 * (padding rows of the head, UNUSED ones) stay forbidden whatever a mask says. */
typedef struct xllm_token_mask {
  uint64_t request_id;
  uint32_t token_index;  /* of the token to be chosen; 0: the first one of the request or call */
  const uint32_t *words; /* bit i % 32 of words[i / 32] set: id i is allowed; copied */
  size_t num_words;      /* ceil(vocab_size / 32) */
} xllm_token_mask;

/* Push masks, in any order and ahead of their turn if known. They come into effect together: those
 * that belong to one step should come in one call, or the first ones are chosen from in a step of
 * their own. Never waits. A later mask for a position takes the place of an earlier one; masks of
 * positions that have been chosen, and of requests that have ended or are not constrained, are
 * dropped.
 * INVALID_ARGUMENT: num_words, or a token_index beyond max_seq_len. NOT_FOUND: a request_id never
 * given out. Then none is taken; detail "entry" is the index of the mask at fault. */
XLLM_API xllm_status xllm_engine_push_masks(xllm_engine *engine, const xllm_token_mask *masks,
                                            size_t num_masks, xllm_error *err);

/* ------------------------------------------------------------------ events */

typedef enum xllm_event_kind {
  XLLM_EVENT_ACCEPTED = 1, /* first: the request has a slot */
  XLLM_EVENT_PREFILL = 2,  /* after each chunk of a prompt of several chunks */
  /* One generated token, the one that ends the answer included (without text). */
  XLLM_EVENT_TOKEN = 3,
  XLLM_EVENT_FINISHED = 4 /* last; always comes, also for a request that was never accepted */
} xllm_event_kind;

typedef enum xllm_finish_reason {
  XLLM_FINISH_NONE = 0, /* the request failed; see status */
  XLLM_FINISH_EOS = 1,
  XLLM_FINISH_STOP_TOKEN = 2,
  XLLM_FINISH_STOP_STRING = 3,
  XLLM_FINISH_MAX_TOKENS = 4,
  XLLM_FINISH_CONTEXT_FULL = 5, /* max_seq_len reached before max_tokens */
  XLLM_FINISH_PREFILLED = 6     /* a prefill: the prompt is in the slot */
} xllm_finish_reason;

typedef struct xllm_candidate {
  int32_t token_id;
  float logprob;
} xllm_candidate;

/* Fields beyond kind and request_id are set for the kinds named beside them and zero otherwise.
 * Pointers live as long as the xllm_events they came from. Times are seconds on a monotonic clock.
 */
typedef struct xllm_event {
  xllm_event_kind kind;
  uint64_t request_id;
  /* ACCEPTED */
  int32_t slot;                 /* index of the seat in the batch */
  uint64_t epoch;               /* of that seat's ownership */
  xllm_decode_mode decode_mode; /* effective, never AUTO */
  uint64_t seed;                /* the one used, drawn where none was given */
  uint32_t max_tokens;          /* effective */
  /* ACCEPTED, PREFILL, FINISHED */
  uint32_t num_prompt_tokens;
  uint32_t num_cached_tokens;   /* of the prompt, taken from the prefix cache */
  uint32_t num_computed_tokens; /* of the prompt, in the cache by now (PREFILL) */
  /* TOKEN */
  int32_t token_id;
  uint32_t token_index; /* 0 for the first generated token */
  const char *piece;    /* the token's raw bytes; NULL without a tokenizer */
  size_t piece_size;
  /* Of the distribution after penalties and before temperature; only where num_logprobs >= 0. */
  float logprob;
  const xllm_candidate *candidates; /* best first */
  size_t num_candidates;
  /* TOKEN, FINISHED: text that this event releases, whole code points. All texts of a request
   * joined are its answer. That of FINISHED is what was held back for a stop string, and U+FFFD for
   * a character that was cut. */
  const char *text;
  size_t text_size;
  /* FINISHED */
  xllm_status status; /* OK: see finish_reason */
  xllm_finish_reason finish_reason;
  int32_t matched_token_id; /* EOS, STOP_TOKEN: the id that ended it; else -1 */
  int32_t matched_stop;     /* STOP_STRING: index of the string; else -1 */
  const char *message;      /* status is not OK: one line; else NULL */
  uint32_t num_generated_tokens;
  /* queue_s in ACCEPTED too; ttft_s is submission to first token, 0 if there was none. */
  double queue_s, prefill_s, decode_s, ttft_s;
  /* ACCEPTED, TOKEN: 1: a constrained request goes on, and the mask of its next position (0, or
   * token_index + 1) has not come yet. */
  int32_t wants_mask;
  /* TOKEN: its place among all tokens by logprob, from 1; lower ids come first on a tie. 0 where
   * num_logprobs is -1. */
  uint32_t rank;
  /* FINISHED: times that it gave its blocks back and was resumed. */
  uint32_t num_preemptions;
  /* FINISHED, status is not OK: lines "key=value\n"; else NULL. KV_EXHAUSTED: blocks_needed,
   * blocks_free, blocks_total; NON_FINITE_LOGITS: position; MEMORY: those of that status. */
  const char *details;
} xllm_event;

/* A batch of events, in order for each request. */
typedef struct xllm_events xllm_events;
XLLM_API size_t xllm_events_count(const xllm_events *events);
XLLM_API const xllm_event *xllm_events_get(const xllm_events *events, size_t index);
XLLM_API void xllm_events_destroy(xllm_events *events);

/* A descriptor that is readable while events of SHARED requests wait; owned by the engine. One
 * wake-up per step, whatever the number of tokens. For poll, epoll or an event loop; do not read or
 * close it. */
XLLM_API int xllm_engine_event_fd(const xllm_engine *engine);

/* Take what has happened.
 *   request_id   0: all events of SHARED requests; else those of that PRIVATE request
 *   timeout_s    how long to wait while there is nothing; 0: not at all; < 0: without limit
 *   out_events   NULL when nothing came in time; else released with xllm_events_destroy
 * NOT_FOUND: no such PRIVATE request, or its FINISHED event has been taken. ENGINE_FAILED: the
 * engine is being destroyed, or has failed and nothing is left to take. */
XLLM_API xllm_status xllm_engine_take_events(xllm_engine *engine, uint64_t request_id,
                                             double timeout_s, xllm_events **out_events,
                                             xllm_error *err);

/* ------------------------------------------------------------------ slots */

/* A slot is a seat in the batch with its KV cache. Requests of xllm_engine_submit take and leave
 * theirs by themselves; a caller that wants to go step by step owns one for a while:
 *
 *   acquire -> ACQUIRED -> prefill -> READY -> decode (a stream of events, or step by step) ->
 *   READY -> ... -> release
 *
 * Ownership   Acquiring raises the slot's epoch; (slot, epoch) names this ownership and is what
 *             every call takes. Once it has ended, each call gives LEASE_LOST (the lease ran out
 *             and nobody has acquired the slot since) or STALE_EPOCH (otherwise). Who may use an
 *             ownership is not the engine's business.
 * Lease       Runs from acquire and from each renewal. At its end, as at release, a call that runs
 *             in the slot ends with LEASE_LOST, and the slot is free and its blocks are back within
 *             one step.
 * Seats       Slots and requests share max_slots seats, first come, first served: acquiring never
 *             ends a request, and requests wait in the queue while owned slots hold every seat.
 * Blocks      Slots and requests share the KV pool of their mode. What runs in an owned slot comes
 *             before all requests, which are preempted for it; an owned slot is never preempted and
 *             keeps its blocks while idle. When not even that frees enough, the call in the slot
 *             ends with KV_EXHAUSTED. Requests wait for blocks that owned slots hold.
 * Tokens      A slot's last token, of a prompt or generated, is computed by the next decode or
 *             prefill: its logits choose what follows. A prompt appended to a READY slot is a
 *             prompt of its own behind the slot's history. Only the first prompt of an ownership is
 *             looked up in the prefix cache, and only its blocks may enter it.
 * Calls end   by completion, cancel (xllm_engine_cancel), deadline or error. The slot stays owned
 *             and its lease goes on: READY with all tokens generated so far after a decode, as it
 *             was before after a prefill that did not complete. */
typedef enum xllm_slot_state {
  XLLM_SLOT_FREE = 0,       /* nobody owns it; it holds no KV block */
  XLLM_SLOT_ACQUIRED = 1,   /* owned, nothing computed yet; of a request: preempted */
  XLLM_SLOT_PREFILLING = 2, /* computing a prompt */
  XLLM_SLOT_READY = 3,      /* holds a prompt; can decode or take more prompt */
  XLLM_SLOT_DECODING = 4,
  XLLM_SLOT_STALLED = 5,
  XLLM_SLOT_CANCELLING = 6 /* being stopped or freed; done within one step */
} xllm_slot_state;

typedef struct xllm_slot_info {
  int32_t slot;
  uint64_t epoch; /* of the present ownership, or of the last one; 0: never owned */
  xllm_slot_state state;
  xllm_decode_mode decode_mode; /* effective while owned; AUTO for a free slot */
  uint64_t request_id;          /* the call or request that runs in it; 0: none */
  /* Positions it holds; of an owned slot with the last one, which the next call computes. */
  uint32_t num_tokens;
  uint32_t num_blocks; /* KV blocks; shared ones count too */
  /* 1: owned through xllm_engine_acquire; 0: free, or a request's own. */
  int32_t is_acquired;
  /* Seconds until the lease ends, 0 when it is over; 0 where is_acquired is 0. */
  double lease_left_s;
  double owned_s; /* seconds since the present owner got it; 0 for a free slot */
} xllm_slot_info;

/* Snapshot of one slot; 0 when there is no such slot, otherwise 1. Never waits for the step loop.
 */
XLLM_API int xllm_engine_get_slot(const xllm_engine *engine, int32_t slot,
                                  xllm_slot_info *out_info);

/* One ownership of a slot, as xllm_engine_acquire returned it. */
typedef struct xllm_slot_ref {
  int32_t slot;
  uint64_t epoch;
} xllm_slot_ref;

typedef struct xllm_acquire_options {
  size_t struct_size;
  xllm_decode_mode decode_mode; /* AUTO; the mode of the slot until it is free again */
  int32_t slot;                 /* -1: any; else this very slot or none */
  double lease_s;               /* 60; length of the lease, more than 0 up to 1e6 */
} xllm_acquire_options;

XLLM_API void xllm_acquire_options_init(xllm_acquire_options *options);

/* Own a free slot. Never waits for the step loop.
 *   options    NULL: defaults
 *   out_info   ACQUIRED, with slot, epoch and the effective mode; set only on OK
 * DECODE_MODE_MISMATCH as the table of modes says. NO_FREE_SLOT: every seat is taken, or the one
 * asked for is. NOT_FOUND: no slot of that number. Of an AUTO engine MEMORY: the set of weights
 * that the slot would need does not fit beside the other (details bytes_needed, bytes_free, remedy;
 * nothing is allocated), and UNIMPLEMENTED: the backend lacks this mode. The set is loaded by the
 * first call that computes. INVALID_ARGUMENT, DRAINING, ENGINE_FAILED. */
XLLM_API xllm_status xllm_engine_acquire(xllm_engine *engine, const xllm_acquire_options *options,
                                         xllm_slot_info *out_info, xllm_error *err);

/* Let the lease end lease_s seconds from now (more than 0 up to 1e6). Never waits. out_info may be
 * NULL. NOT_FOUND: no slot of that number. STALE_EPOCH, LEASE_LOST. */
XLLM_API xllm_status xllm_engine_renew(xllm_engine *engine, xllm_slot_ref ref, double lease_s,
                                       xllm_slot_info *out_info, xllm_error *err);

/* End the ownership; a call that runs in the slot ends with LEASE_LOST. Never waits: the slot is
 * FREE at once where it holds no block and nothing runs in it, else CANCELLING and free within one
 * step. out_info, which may be NULL, says which. NOT_FOUND, STALE_EPOCH, LEASE_LOST: it had ended
 * before. */
XLLM_API xllm_status xllm_engine_release(xllm_engine *engine, xllm_slot_ref ref,
                                         xllm_slot_info *out_info, xllm_error *err);

/* Own a further slot that continues from where a READY one is, in the same mode, and is READY at
 * once. They share their KV blocks; the partly filled one is copied when one of them writes to it.
 * The slot that is forked stays as it is. Never waits.
 *   lease_s    of the new slot, as for xllm_engine_acquire
 *   out_info   the new slot; set only on OK
 * SLOT_STATE: not READY. NO_FREE_SLOT. NOT_FOUND, STALE_EPOCH, LEASE_LOST, INVALID_ARGUMENT,
 * DRAINING, ENGINE_FAILED. */
XLLM_API xllm_status xllm_engine_fork(xllm_engine *engine, xllm_slot_ref ref, double lease_s,
                                      xllm_slot_info *out_info, xllm_error *err);

typedef struct xllm_prefill_options {
  size_t struct_size;
  const int32_t *prompt; /* num_prompt ids in [0, vocab_size), at least 1; copied */
  size_t num_prompt;
  xllm_delivery delivery; /* SHARED */
  double max_duration_s;  /* 0: no limit; seconds from now, then DEADLINE_EXCEEDED */
  xllm_cache_options cache;
} xllm_prefill_options;

XLLM_API void xllm_prefill_options_init(xllm_prefill_options *options);

/* Compute a prompt into an ACQUIRED slot, or append one to a READY slot. Never waits; events follow
 * as for a request: ACCEPTED, PREFILL after each chunk, FINISHED with finish_reason PREFILLED and
 * the slot READY. The id is one for xllm_engine_cancel and take_events. SLOT_STATE: something runs
 * in the slot. PROMPT_TOO_LONG: history and prompt leave no room for one token in max_seq_len.
 * NEVER_FITS: they exceed the whole KV pool. NOT_FOUND, STALE_EPOCH, LEASE_LOST, INVALID_ARGUMENT,
 * DRAINING, ENGINE_FAILED. FINISHED may say KV_EXHAUSTED, LEASE_LOST, CANCELLED, DEADLINE_EXCEEDED,
 * and MEMORY where this call loads weights. */
XLLM_API xllm_status xllm_engine_prefill(xllm_engine *engine, xllm_slot_ref ref,
                                         const xllm_prefill_options *options, uint64_t *out_id,
                                         xllm_error *err);

/* Per-slot API: generate in one READY slot that was acquired PER_SLOT. Never waits; events are
 * those of a request without PREFILL (num_prompt_tokens and num_cached_tokens are 0, token_index
 * counts from 0 in each call).
 *   request   how to generate: sampling, stops, limits, delivery. Without prompt; decode_mode AUTO
 *             or PER_SLOT; priority and max_queue_s do nothing. Penalties count the slot's prompts
 *             and all that it has generated.
 * DECODE_MODE_MISMATCH: a batched slot. SLOT_STATE: the slot is not READY, or is full (num_tokens
 * is max_seq_len). The rest as for xllm_engine_prefill and xllm_engine_submit. */
XLLM_API xllm_status xllm_engine_decode_slot(xllm_engine *engine, xllm_slot_ref ref,
                                             const xllm_request *request, uint64_t *out_id,
                                             xllm_error *err);

/* Batched API: generate in several READY batched slots in lock-step: all begin in the same step,
 * and every one that still runs advances by one token in each step, a constrained one in each step
 * that its mask comes in time for.
 *   requests   [num_slots], one for each ref as for xllm_engine_decode_slot (decode_mode AUTO or
 *              BATCHED); the refs all differ
 *   out_ids    [num_slots]; each entry has events of its own, and ends by itself or by
 *              xllm_engine_cancel
 * Refused as a whole when one entry is, before any slot changes; detail "entry" is its index.
 * DECODE_MODE_MISMATCH: a per-slot slot. */
XLLM_API xllm_status xllm_engine_decode_batch(xllm_engine *engine, const xllm_slot_ref *refs,
                                              const xllm_request *requests, size_t num_slots,
                                              uint64_t *out_ids, xllm_error *err);

/* Step calls: one token each, in process. They wait for that one step (behind a step in progress),
 * and leave the slots READY.
 *   sampling     how to choose, [num_slots] for the batch; NULL: greedy. Ends of generation are
 *                tokens like any other.
 *   out_token    the chosen token, [num_slots] for the batch
 *   out_logits   NULL, or f32 [vocab_size] of the row that chose it, before biases and penalties,
 *                [num_slots, vocab_size] for the batch
 * Errors as for decode_slot and decode_batch, and what ended the step instead of a token:
 * LEASE_LOST, KV_EXHAUSTED, NON_FINITE_LOGITS, ENGINE_FAILED, MEMORY. In a batch that is the first
 * failed entry's (detail "entry"); the others have advanced, and out_token of a failed one is -1.
 */
XLLM_API xllm_status xllm_engine_decode_step_slot(xllm_engine *engine, xllm_slot_ref ref,
                                                  const xllm_sampling_params *sampling,
                                                  int32_t *out_token, float *out_logits,
                                                  xllm_error *err);
XLLM_API xllm_status xllm_engine_decode_step_batch(xllm_engine *engine, const xllm_slot_ref *refs,
                                                   const xllm_sampling_params *sampling,
                                                   size_t num_slots, int32_t *out_tokens,
                                                   float *out_logits, xllm_error *err);

/* ------------------------------------------------------------------ operation */

/* Refuse new requests with DRAINING from now on; those that are in go on. */
XLLM_API void xllm_engine_drain(xllm_engine *engine);

/* A snapshot; never waits for the step loop. Counters run from creation. */
typedef struct xllm_engine_stats {
  uint32_t num_running, num_waiting;
  uint32_t slots_total, slots_used;
  uint64_t blocks_total, blocks_used; /* used: held by live requests */
  uint64_t blocks_cached;             /* held by the prefix cache alone, free for the asking */
  uint64_t num_steps;
  uint64_t num_prompt_tokens, num_cached_tokens, num_generated_tokens;
  uint64_t num_requests_finished, num_requests_cancelled, num_requests_failed;
  uint64_t num_preemptions;
  double last_step_s;        /* duration of the last step */
  double heartbeat_age_s;    /* since the loop last showed that it lives; grows while it is stuck */
  uint32_t cancel_steps_max; /* steps between a cancel and its blocks being free, largest so far */
  uint64_t workspace_bytes;
  int32_t is_draining, has_failed;
  double token_gap_bound_s; /* max_token_gap_s */
  /* Longest time between two tokens of a stream that was neither preempted nor waiting for a mask
   * in between. */
  double token_gap_max_s;
  double prefill_tokens_per_s; /* of late, in steps that held prefill; 0: none yet */
} xllm_engine_stats;

XLLM_API void xllm_engine_get_stats(const xllm_engine *engine, xllm_engine_stats *out_stats);

#ifdef __cplusplus
}
#endif

#endif /* XLLM_H_ */

# The C ABI of the core, mirrored from cuda_src/include/xllm.h, which documents it.

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, uint32_t, uint64_t


cdef extern from "xllm.h" nogil:
    const int XLLM_ABI_VERSION

    ctypedef enum xllm_status:
        XLLM_STATUS_OK

    ctypedef struct xllm_error:
        xllm_status status
        char message[1024]
        char details[2048]

    const char *xllm_status_name(xllm_status status)
    const char *xllm_version()
    int xllm_abi_version()
    const char *xllm_build_id()
    void xllm_free(void *memory)

    ctypedef enum xllm_decode_mode:
        pass
    ctypedef enum xllm_backend:
        pass
    ctypedef enum xllm_kv_type:
        pass
    ctypedef void (*xllm_log_fn)(void *user, const char *line) noexcept nogil

    # ---- model

    ctypedef struct xllm_model:
        pass

    ctypedef struct xllm_model_options:
        size_t struct_size
        const char *pretokenizer

    void xllm_model_options_init(xllm_model_options *options)
    xllm_status xllm_model_open(const char *path, const xllm_model_options *options, xllm_model **out_model,
                                xllm_error *err)
    void xllm_model_close(xllm_model *model)

    ctypedef struct xllm_model_info:
        const char *architecture
        const char *name
        const char *path
        uint64_t file_bytes
        uint64_t num_params
        int32_t has_weights
        int32_t num_layers
        int32_t hidden_size
        int32_t intermediate_size
        int32_t num_heads
        int32_t num_kv_heads
        int32_t head_dim
        int32_t vocab_size
        int32_t num_real_tokens
        int32_t context_length
        const char *tokenizer_model
        const char *pretokenizer
        int32_t has_tokenizer
        int32_t bos_token_id
        int32_t add_bos
        const char *chat_template
        size_t chat_template_size

    void xllm_model_get_info(const xllm_model *model, xllm_model_info *out_info)

    ctypedef struct xllm_metadata:
        const char *key
        const char *type
        const char *value_json
    ctypedef struct xllm_tensor_info:
        const char *name
        const char *dtype
        int32_t num_dims
        uint64_t dims[4]
        uint64_t size_bytes
        uint64_t file_offset
    ctypedef struct xllm_fact:
        const char *name
        const char *value
        const char *source
    ctypedef struct xllm_end_token:
        int32_t token_id
        const char *text
        const char *source
    int xllm_model_get_metadata(const xllm_model *model, size_t index, xllm_metadata *out)
    int xllm_model_get_tensor(const xllm_model *model, size_t index, xllm_tensor_info *out)
    int xllm_model_get_fact(const xllm_model *model, size_t index, xllm_fact *out)
    int xllm_model_get_end_token(const xllm_model *model, size_t index, xllm_end_token *out)

    ctypedef struct xllm_text:
        const char *data
        size_t size
        int32_t trusted

    xllm_status xllm_model_encode(const xllm_model *model, const xllm_text *texts, size_t num_texts, int add_special,
                                  int32_t **out_ids, size_t *out_num, xllm_error *err)
    xllm_status xllm_model_decode(const xllm_model *model, const int32_t *ids, size_t num_ids, int render_special,
                                  char **out_text, size_t *out_size, xllm_error *err)
    xllm_status xllm_model_token_piece(const xllm_model *model, int32_t id, const char **out_bytes, size_t *out_size,
                                       int32_t *out_type, xllm_error *err)

    # ---- engine

    ctypedef struct xllm_engine:
        pass

    ctypedef struct xllm_engine_config:
        size_t struct_size
        xllm_backend backend
        xllm_decode_mode decode_mode
        xllm_kv_type kv_type
        int32_t max_slots
        int32_t max_seq_len
        int32_t allow_long_context
        int32_t prefill_chunk
        int32_t block_size
        int32_t max_queue
        int32_t num_threads
        int32_t device_index
        uint64_t kv_memory
        uint64_t memory_limit
        const char *instruction_set
        xllm_log_fn log
        void *log_user
        double max_token_gap_s

    void xllm_engine_config_init(xllm_engine_config *config)

    ctypedef struct xllm_plan:
        uint64_t raw_weight_bytes
        uint64_t dequantized_weight_bytes
        uint64_t mapped_bytes
        uint64_t kv_bytes_per_token
        uint64_t kv_pool_bytes
        uint64_t kv_num_blocks
        uint64_t scratch_bytes
        uint64_t table_bytes
        uint64_t total_bytes
        uint64_t device_total_bytes
        uint64_t device_free_bytes
        int32_t block_size
        int32_t fits

    xllm_status xllm_model_plan(const xllm_model *model, const xllm_engine_config *config, xllm_plan *out_plan,
                                xllm_error *err)
    xllm_status xllm_engine_create(xllm_model *model, const xllm_engine_config *config, xllm_engine **out_engine,
                                   xllm_error *err)
    void xllm_engine_destroy(xllm_engine *engine)

    ctypedef struct xllm_engine_info:
        const char *device_kind
        const char *device_name
        const char *kernels
        int32_t num_threads
        const char *threads_limit
        xllm_decode_mode decode_mode
        xllm_kv_type kv_type
        int32_t max_slots
        int32_t max_seq_len
        int32_t prefill_chunk
        int32_t block_size
        int32_t max_queue
        xllm_plan plan
        double load_s

    void xllm_engine_get_info(const xllm_engine *engine, xllm_engine_info *out_info)

    # ---- requests

    ctypedef struct xllm_sampling_params:
        float temperature
        int32_t top_k
        float top_p
        float min_p
        float repetition_penalty
        float frequency_penalty
        float presence_penalty
        int32_t has_seed
        uint64_t seed

    void xllm_sampling_params_init(xllm_sampling_params *params)

    ctypedef struct xllm_logit_bias:
        int32_t token_id
        float bias

    ctypedef enum xllm_delivery:
        XLLM_DELIVERY_SHARED
        XLLM_DELIVERY_PRIVATE

    ctypedef struct xllm_cache_options:
        const char *salt
        size_t salt_size
        int32_t bypass

    ctypedef struct xllm_request:
        size_t struct_size
        const int32_t *prompt
        size_t num_prompt
        xllm_decode_mode decode_mode
        xllm_delivery delivery
        xllm_sampling_params sampling
        uint32_t max_tokens
        uint32_t min_tokens
        int32_t ignore_eos
        int32_t num_logprobs
        const xllm_text *stop_strings
        size_t num_stop_strings
        const int32_t *stop_token_ids
        size_t num_stop_token_ids
        const xllm_logit_bias *logit_biases
        size_t num_logit_biases
        int32_t priority
        double max_queue_s
        double max_duration_s
        int32_t is_constrained
        xllm_cache_options cache
        uint64_t tenant

    void xllm_request_init(xllm_request *request)
    xllm_status xllm_engine_submit(xllm_engine *engine, const xllm_request *request, uint64_t *out_id, xllm_error *err)
    xllm_status xllm_engine_submit_outputs(xllm_engine *engine, const xllm_request *request, size_t num_outputs,
                                           uint64_t *out_ids, xllm_error *err)
    xllm_status xllm_engine_count_cached(const xllm_engine *engine, const int32_t *prompt, size_t num_prompt,
                                         xllm_decode_mode decode_mode, const xllm_cache_options *cache,
                                         uint32_t *out_num, xllm_error *err)
    xllm_status xllm_engine_cancel(xllm_engine *engine, uint64_t request_id, xllm_error *err)

    # ---- masks

    ctypedef struct xllm_token_mask:
        uint64_t request_id
        uint32_t token_index
        const uint32_t *words
        size_t num_words

    xllm_status xllm_engine_push_masks(xllm_engine *engine, const xllm_token_mask *masks, size_t num_masks,
                                       xllm_error *err) nogil

    # ---- events

    ctypedef enum xllm_event_kind:
        XLLM_EVENT_ACCEPTED
        XLLM_EVENT_PREFILL
        XLLM_EVENT_TOKEN
        XLLM_EVENT_FINISHED
    ctypedef enum xllm_finish_reason:
        pass

    ctypedef struct xllm_candidate:
        int32_t token_id
        float logprob

    ctypedef struct xllm_event:
        xllm_event_kind kind
        uint64_t request_id
        int32_t slot
        uint64_t epoch
        xllm_decode_mode decode_mode
        uint64_t seed
        uint32_t max_tokens
        uint32_t num_prompt_tokens
        uint32_t num_cached_tokens
        uint32_t num_computed_tokens
        int32_t token_id
        uint32_t token_index
        const char *piece
        size_t piece_size
        float logprob
        const xllm_candidate *candidates
        size_t num_candidates
        const char *text
        size_t text_size
        xllm_status status
        xllm_finish_reason finish_reason
        int32_t matched_token_id
        int32_t matched_stop
        const char *message
        uint32_t num_generated_tokens
        double queue_s
        double prefill_s
        double decode_s
        double ttft_s
        int32_t wants_mask
        uint32_t rank
        uint32_t num_preemptions
        const char *details

    ctypedef struct xllm_events:
        pass
    size_t xllm_events_count(const xllm_events *events)
    const xllm_event *xllm_events_get(const xllm_events *events, size_t index)
    void xllm_events_destroy(xllm_events *events)
    int xllm_engine_event_fd(const xllm_engine *engine)
    xllm_status xllm_engine_take_events(xllm_engine *engine, uint64_t request_id, double timeout_s,
                                        xllm_events **out_events, xllm_error *err)

    # ---- operation

    void xllm_engine_drain(xllm_engine *engine)

    ctypedef struct xllm_engine_stats:
        uint32_t num_running
        uint32_t num_waiting
        uint32_t slots_total
        uint32_t slots_used
        uint64_t blocks_total
        uint64_t blocks_used
        uint64_t blocks_cached
        uint64_t num_steps
        uint64_t num_prompt_tokens
        uint64_t num_cached_tokens
        uint64_t num_generated_tokens
        uint64_t num_requests_finished
        uint64_t num_requests_cancelled
        uint64_t num_requests_failed
        uint64_t num_preemptions
        double last_step_s
        double heartbeat_age_s
        uint32_t cancel_steps_max
        uint64_t workspace_bytes
        int32_t is_draining
        int32_t has_failed
        double token_gap_bound_s
        double token_gap_max_s
        double prefill_tokens_per_s

    void xllm_engine_get_stats(const xllm_engine *engine, xllm_engine_stats *out_stats)

    # ---- slots

    ctypedef enum xllm_slot_state:
        pass

    ctypedef struct xllm_slot_info:
        int32_t slot
        uint64_t epoch
        xllm_slot_state state
        xllm_decode_mode decode_mode
        uint64_t request_id
        uint32_t num_tokens
        uint32_t num_blocks
        int32_t is_acquired
        double lease_left_s
        double owned_s

    int xllm_engine_get_slot(const xllm_engine *engine, int32_t slot, xllm_slot_info *out_info)

    ctypedef struct xllm_slot_ref:
        int32_t slot
        uint64_t epoch

    ctypedef struct xllm_acquire_options:
        size_t struct_size
        xllm_decode_mode decode_mode
        int32_t slot
        double lease_s

    void xllm_acquire_options_init(xllm_acquire_options *options)
    xllm_status xllm_engine_acquire(xllm_engine *engine, const xllm_acquire_options *options, xllm_slot_info *out_info,
                                    xllm_error *err)
    xllm_status xllm_engine_renew(xllm_engine *engine, xllm_slot_ref ref, double lease_s, xllm_slot_info *out_info,
                                  xllm_error *err)
    xllm_status xllm_engine_release(xllm_engine *engine, xllm_slot_ref ref, xllm_slot_info *out_info, xllm_error *err)

    xllm_status xllm_engine_fork(xllm_engine *engine, xllm_slot_ref ref, double lease_s, xllm_slot_info *out_info,
                                 xllm_error *err)

    ctypedef struct xllm_prefill_options:
        size_t struct_size
        const int32_t *prompt
        size_t num_prompt
        xllm_delivery delivery
        double max_duration_s
        xllm_cache_options cache

    void xllm_prefill_options_init(xllm_prefill_options *options)
    xllm_status xllm_engine_prefill(xllm_engine *engine, xllm_slot_ref ref, const xllm_prefill_options *options,
                                    uint64_t *out_id, xllm_error *err)
    xllm_status xllm_engine_decode_slot(xllm_engine *engine, xllm_slot_ref ref, const xllm_request *request,
                                        uint64_t *out_id, xllm_error *err)
    xllm_status xllm_engine_decode_batch(xllm_engine *engine, const xllm_slot_ref *refs, const xllm_request *requests,
                                         size_t num_slots, uint64_t *out_ids, xllm_error *err)
    xllm_status xllm_engine_decode_step_slot(xllm_engine *engine, xllm_slot_ref ref,
                                             const xllm_sampling_params *sampling, int32_t *out_token,
                                             float *out_logits, xllm_error *err) nogil
    xllm_status xllm_engine_decode_step_batch(xllm_engine *engine, const xllm_slot_ref *refs,
                                              const xllm_sampling_params *sampling, size_t num_slots,
                                              int32_t *out_tokens, float *out_logits, xllm_error *err) nogil

# cython: language_level=3, embedsignature=True
"""The engine as Python objects, over the C ABI of ``xllm.h``.

Blocking calls release the GIL, and no thread of the engine ever takes it: results wait in the core until they are
asked for. Documentation of the public names is in ``_core.pyi``.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, uint64_t
from libc.stdlib cimport calloc, free

from cyengine cimport c_xllm as c

import os
import time

from cyengine import errors, types


cdef extern from "<stdio.h>" nogil:
    int dprintf(int fd, const char *format, ...)


if c.xllm_abi_version() != c.XLLM_ABI_VERSION:
    raise ImportError(
        f"the xLLM core has ABI {c.xllm_abi_version()}, this module was built for {c.XLLM_ABI_VERSION}: "
        "rebuild with ./build.sh"
    )
for _status in types.Status:
    if c.xllm_status_name(<c.xllm_status><int>_status).decode() != _status.name:
        raise ImportError(f"cyengine.types.Status.{_status.name} does not match xllm.h: rebuild with ./build.sh")
del _status

version = c.xllm_version().decode()
build_id = c.xllm_build_id().decode()


WAIT_SLICE_S = 0.1  # longest wait in the core before Python's signals are looked at again


# ---------------------------------------------------------------- helpers

cdef object _details(const char *text):
    return dict(line.split("=", 1) for line in text.decode("utf-8", "replace").splitlines() if "=" in line)


cdef int _check(c.xllm_status status, const c.xllm_error *err) except -1:
    # The one place where a status of the core becomes an exception.
    if status != c.XLLM_STATUS_OK:
        raise errors.error_from_status(status, err.message.decode("utf-8", "replace"), _details(err.details))
    return 0


cdef void _log_to_fd(void *user, const char *line) noexcept nogil:
    dprintf(<int><size_t>user, b"%s\n", line)


cdef int32_t *_copy_ids(object ids, size_t *num) except? NULL:
    # A malloc'ed copy of a sequence of token ids; NULL with num 0 for an empty one.
    cdef size_t n = len(ids)
    cdef size_t i = 0
    cdef int32_t *copy
    num[0] = n
    if n == 0:
        return NULL
    copy = <int32_t *>calloc(n, sizeof(int32_t))
    if copy == NULL:
        raise MemoryError
    try:
        for value in ids:
            if i == n:
                break
            copy[i] = value
            i += 1
    except OverflowError:
        free(copy)
        raise errors.InvalidArgumentError(
            f"token id {value} at index {i} is outside the vocabulary", details={"field": "token_ids", "index": str(i)}
        ) from None
    except BaseException:
        free(copy)
        raise
    num[0] = i
    return copy


cdef str _text(const char *data, size_t size):
    return PyUnicode_DecodeUTF8(data, size, NULL) if size else ""


cdef object _plan(const c.xllm_plan *p):
    return types.Plan(
        raw_weight_bytes=p.raw_weight_bytes, dequantized_weight_bytes=p.dequantized_weight_bytes,
        mapped_bytes=p.mapped_bytes, kv_bytes_per_token=p.kv_bytes_per_token, kv_pool_bytes=p.kv_pool_bytes,
        kv_num_blocks=p.kv_num_blocks, scratch_bytes=p.scratch_bytes, table_bytes=p.table_bytes,
        total_bytes=p.total_bytes, device_total_bytes=p.device_total_bytes, device_free_bytes=p.device_free_bytes,
        block_size=p.block_size, fits=bool(p.fits),
    )


cdef int _in_range(str name, object value, object low, object high) except -1:
    # C fields are narrower than Python's int: refuse by name what would not survive the conversion.
    if not low <= value <= high:
        raise errors.InvalidArgumentError(f"{name} must be in [{low}, {high}], found {value}", details={"field": name})
    return 0


cdef int _fill_config(object config, c.xllm_engine_config *out, object keep) except -1:
    # `keep` holds the bytes objects that `out` points into.
    for name in ("max_slots", "max_seq_len", "prefill_chunk", "block_size", "max_queue", "num_threads", "device_index"):
        _in_range(name, getattr(config, name), 0, 2**31 - 1)
    for name in ("kv_memory", "memory_limit"):
        _in_range(name, getattr(config, name), 0, 2**64 - 1)
    c.xllm_engine_config_init(out)
    out.backend = <c.xllm_backend><int>config.backend
    out.decode_mode = <c.xllm_decode_mode><int>config.decode_mode
    out.kv_type = <c.xllm_kv_type><int>config.kv_type
    out.max_slots = config.max_slots
    out.max_seq_len = config.max_seq_len
    out.allow_long_context = config.allow_long_context
    out.prefill_chunk = config.prefill_chunk
    out.block_size = config.block_size
    out.max_queue = config.max_queue
    out.num_threads = config.num_threads
    out.device_index = config.device_index
    out.kv_memory = config.kv_memory
    out.memory_limit = config.memory_limit
    if config.instruction_set is not None:
        keep.append(config.instruction_set.encode())
        out.instruction_set = keep[-1]
    if config.log_fd is not None:
        _in_range("log_fd", config.log_fd, 0, 2**31 - 1)
        out.log = _log_to_fd
        out.log_user = <void *><size_t>config.log_fd
    return 0


cdef object _event(const c.xllm_event *e):
    cdef size_t i
    if e.kind == c.XLLM_EVENT_TOKEN:
        candidates = [
            types.Candidate(e.candidates[i].token_id, e.candidates[i].logprob) for i in range(e.num_candidates)
        ]
        return types.TokenEvent(
            e.request_id, e.token_id, e.token_index,
            PyBytes_FromStringAndSize(e.piece, e.piece_size) if e.piece != NULL else b"",
            _text(e.text, e.text_size), e.logprob, candidates,
        )
    if e.kind == c.XLLM_EVENT_ACCEPTED:
        return types.AcceptedEvent(
            e.request_id, e.slot, e.epoch, types.DecodeMode(e.decode_mode), e.seed, e.max_tokens, e.num_prompt_tokens,
            e.num_cached_tokens, e.queue_s,
        )
    if e.kind == c.XLLM_EVENT_PREFILL:
        return types.PrefillEvent(e.request_id, e.num_prompt_tokens, e.num_cached_tokens, e.num_computed_tokens)
    return types.FinishedEvent(
        e.request_id, types.Status(e.status), types.FinishReason(e.finish_reason),
        e.matched_token_id if e.matched_token_id >= 0 else None, e.matched_stop if e.matched_stop >= 0 else None,
        _text(e.text, e.text_size), e.message.decode("utf-8", "replace") if e.message != NULL else "",
        e.num_prompt_tokens, e.num_cached_tokens, e.num_generated_tokens, e.queue_s, e.prefill_s, e.decode_s, e.ttft_s,
    )


# ---------------------------------------------------------------- model

cdef class Model:
    cdef c.xllm_model *_handle
    cdef object _info
    # Calls that are in the core without the GIL; close() waits for them. Counted under the GIL.
    cdef int _calls

    def __init__(self, path, *, pretokenizer=None):
        cdef c.xllm_error err
        cdef c.xllm_model_options options
        cdef c.xllm_status status
        cdef bytes path_bytes = os.fsencode(path)
        cdef bytes name_bytes
        cdef const char *c_path = path_bytes
        if self._handle != NULL:
            raise TypeError("a Model is opened once: make another")
        c.xllm_model_options_init(&options)
        if pretokenizer is not None:
            name_bytes = pretokenizer.encode()
            options.pretokenizer = name_bytes
        with nogil:
            status = c.xllm_model_open(c_path, &options, &self._handle, &err)
        _check(status, &err)

    def __dealloc__(self):
        c.xllm_model_close(self._handle)

    cdef c.xllm_model *_open(self) except NULL:
        if self._handle == NULL:
            raise errors.NotFoundError("the model is closed: open it again with Model(path)")
        return self._handle

    def close(self):
        cdef c.xllm_model *handle = self._handle
        self._handle = NULL
        while self._calls > 0:
            time.sleep(0.001)
        c.xllm_model_close(handle)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    @property
    def info(self):
        cdef c.xllm_model_info i
        if self._info is None:
            c.xllm_model_get_info(self._open(), &i)
            self._info = types.ModelInfo(
                architecture=i.architecture.decode("utf-8", "replace"), name=i.name.decode("utf-8", "replace"),
                path=os.fsdecode(i.path), file_bytes=i.file_bytes, num_params=i.num_params,
                has_weights=bool(i.has_weights), num_layers=i.num_layers, hidden_size=i.hidden_size, intermediate_size=i.intermediate_size,
                num_heads=i.num_heads, num_kv_heads=i.num_kv_heads, head_dim=i.head_dim, vocab_size=i.vocab_size,
                num_real_tokens=i.num_real_tokens, context_length=i.context_length,
                tokenizer_model=i.tokenizer_model.decode("utf-8", "replace"),
                pretokenizer=i.pretokenizer.decode("utf-8", "replace"), has_tokenizer=bool(i.has_tokenizer),
                bos_token_id=i.bos_token_id if i.bos_token_id >= 0 else None, add_bos=bool(i.add_bos),
                chat_template=i.chat_template[:i.chat_template_size].decode("utf-8", "replace"),
            )
        return self._info

    def metadata(self):
        cdef c.xllm_metadata m
        cdef size_t index = 0
        found = []
        while c.xllm_model_get_metadata(self._open(), index, &m):
            found.append(types.Metadata(*(text.decode("utf-8", "replace") for text in (m.key, m.type, m.value_json))))
            index += 1
        return found

    def tensors(self):
        cdef c.xllm_tensor_info t
        cdef size_t index = 0
        cdef int d
        found = []
        while c.xllm_model_get_tensor(self._open(), index, &t):
            found.append(types.TensorInfo(
                t.name.decode("utf-8", "replace"), t.dtype.decode(), tuple([t.dims[d] for d in range(t.num_dims)]),
                t.size_bytes, t.file_offset,
            ))
            index += 1
        return found

    def facts(self):
        cdef c.xllm_fact f
        cdef size_t index = 0
        found = []
        while c.xllm_model_get_fact(self._open(), index, &f):
            found.append(types.Fact(*(text.decode("utf-8", "replace") for text in (f.name, f.value, f.source))))
            index += 1
        return found

    def end_tokens(self):
        cdef c.xllm_end_token t
        cdef size_t index = 0
        found = []
        while c.xllm_model_get_end_token(self._open(), index, &t):
            found.append(types.EndToken(
                t.token_id, t.text.decode("utf-8", "replace"), t.source.decode("utf-8", "replace")))
            index += 1
        return found

    def encode(self, text, *, add_special=True, parse_special=False):
        cdef c.xllm_error err
        cdef c.xllm_status status
        cdef int32_t *ids = NULL
        cdef size_t num_ids = 0
        cdef size_t i
        cdef int special = add_special
        cdef c.xllm_model *handle = self._open()
        cdef c.xllm_text *texts
        if isinstance(text, (str, bytes)):
            pieces = [(text, parse_special)]
        else:
            pieces = [(piece.text, piece.trusted) for piece in text]
        keep = [piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else piece for piece, _ in pieces]
        cdef size_t num_texts = len(pieces)
        texts = <c.xllm_text *>calloc(num_texts if num_texts else 1, sizeof(c.xllm_text))
        if texts == NULL:
            raise MemoryError
        try:
            for i in range(num_texts):
                texts[i].data = <const char *><bytes>keep[i]
                texts[i].size = len(keep[i])
                texts[i].trusted = pieces[i][1]
            self._calls += 1
            with nogil:
                status = c.xllm_model_encode(handle, texts, num_texts, special, &ids, &num_ids, &err)
            self._calls -= 1
            _check(status, &err)
            return [ids[i] for i in range(num_ids)]
        finally:
            free(texts)
            c.xllm_free(ids)

    def decode(self, ids, *, render_special=False):
        cdef c.xllm_error err
        cdef c.xllm_status status
        cdef size_t num_ids = 0
        cdef size_t size = 0
        cdef char *text = NULL
        cdef int special = render_special
        cdef c.xllm_model *handle = self._open()
        cdef int32_t *copy = _copy_ids(ids, &num_ids)
        try:
            self._calls += 1
            with nogil:
                status = c.xllm_model_decode(handle, copy, num_ids, special, &text, &size, &err)
            self._calls -= 1
            _check(status, &err)
            return _text(text, size)
        finally:
            free(copy)
            c.xllm_free(text)

    def token_piece(self, token_id):
        cdef c.xllm_error err
        cdef const char *data = NULL
        cdef size_t size = 0
        cdef int32_t token_type = 0
        _in_range("token_id", token_id, -(2**31), 2**31 - 1)
        _check(c.xllm_model_token_piece(self._open(), token_id, &data, &size, &token_type, &err), &err)
        return PyBytes_FromStringAndSize(data, size), token_type

    def plan(self, config=None):
        cdef c.xllm_error err
        cdef c.xllm_status status
        cdef c.xllm_engine_config cc
        cdef c.xllm_plan p
        cdef c.xllm_model *handle = self._open()
        keep = []
        _fill_config(types.EngineConfig() if config is None else config, &cc, keep)
        self._calls += 1
        with nogil:
            status = c.xllm_model_plan(handle, &cc, &p, &err)
        self._calls -= 1
        _check(status, &err)
        return _plan(&p)


# ---------------------------------------------------------------- engine

cdef class Engine:
    cdef c.xllm_engine *_handle
    cdef Model _model
    cdef bint _owns_model
    cdef object _info
    # Calls that are in the core without the GIL; close() waits for them. Counted under the GIL.
    cdef int _calls

    def __init__(self, model, config=None):
        cdef c.xllm_error err
        cdef c.xllm_status status
        cdef c.xllm_engine_config cc
        cdef c.xllm_model *handle
        if self._handle != NULL:
            raise TypeError("an Engine is made once: make another")
        self._owns_model = not isinstance(model, Model)
        self._model = Model(model) if self._owns_model else model
        handle = self._model._open()
        keep = []
        _fill_config(types.EngineConfig() if config is None else config, &cc, keep)
        self._model._calls += 1
        with nogil:
            status = c.xllm_engine_create(handle, &cc, &self._handle, &err)
        self._model._calls -= 1
        _check(status, &err)

    def __dealloc__(self):
        cdef c.xllm_engine *handle = self._handle
        self._handle = NULL
        with nogil:
            c.xllm_engine_destroy(handle)

    cdef c.xllm_engine *_open(self) except NULL:
        if self._handle == NULL:
            raise errors.EngineFailedError("the engine is closed: make another Engine")
        return self._handle

    def close(self):
        cdef c.xllm_engine *handle = self._handle
        self._handle = NULL
        while self._calls > 0:
            time.sleep(0.001)
        with nogil:
            c.xllm_engine_destroy(handle)
        if self._owns_model and self._model is not None:
            self._model.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    @property
    def model(self):
        return self._model

    @property
    def info(self):
        cdef c.xllm_engine_info i
        if self._info is None:
            c.xllm_engine_get_info(self._open(), &i)
            self._info = types.EngineInfo(
                device_kind=i.device_kind.decode(), device_name=i.device_name.decode("utf-8", "replace"),
                kernels=i.kernels.decode(), num_threads=i.num_threads, threads_limit=i.threads_limit.decode(),
                decode_mode=types.DecodeMode(i.decode_mode), kv_type=types.KvType(i.kv_type), max_slots=i.max_slots,
                max_seq_len=i.max_seq_len, prefill_chunk=i.prefill_chunk, block_size=i.block_size,
                max_queue=i.max_queue, plan=_plan(&i.plan), load_s=i.load_s,
            )
        return self._info

    def submit(self, request, *, private=False):
        cdef c.xllm_error err
        cdef c.xllm_request r
        cdef uint64_t request_id = 0
        cdef size_t i
        cdef int32_t *prompt = NULL
        cdef int32_t *stop_ids = NULL
        cdef c.xllm_text *stops = NULL
        cdef c.xllm_logit_bias *biases = NULL
        cdef c.xllm_engine *handle = self._open()
        sampling = request.sampling
        for name in ("max_tokens", "min_tokens"):
            _in_range(name, getattr(request, name), 0, 2**32 - 1)
        _in_range("priority", request.priority, -(2**31), 2**31 - 1)
        _in_range("top_k", sampling.top_k, -(2**31), 2**31 - 1)
        if sampling.seed is not None:
            _in_range("seed", sampling.seed, 0, 2**64 - 1)
        if request.num_logprobs is not None:
            _in_range("num_logprobs", request.num_logprobs, 0, 2**31 - 1)
        c.xllm_request_init(&r)
        r.decode_mode = <c.xllm_decode_mode><int>request.decode_mode
        r.delivery = c.XLLM_DELIVERY_PRIVATE if private else c.XLLM_DELIVERY_SHARED
        r.sampling.temperature = sampling.temperature
        r.sampling.top_k = sampling.top_k
        r.sampling.top_p = sampling.top_p
        r.sampling.min_p = sampling.min_p
        r.sampling.repetition_penalty = sampling.repetition_penalty
        r.sampling.frequency_penalty = sampling.frequency_penalty
        r.sampling.presence_penalty = sampling.presence_penalty
        r.sampling.has_seed = sampling.seed is not None
        r.sampling.seed = 0 if sampling.seed is None else sampling.seed
        r.max_tokens = request.max_tokens
        r.min_tokens = request.min_tokens
        r.ignore_eos = request.ignore_eos
        r.num_logprobs = -1 if request.num_logprobs is None else request.num_logprobs
        r.priority = request.priority
        r.max_queue_s = request.max_queue_s
        r.max_duration_s = request.max_duration_s
        stop_bytes = [stop.encode("utf-8", "surrogatepass") for stop in request.stop_strings]
        bias_items = list(request.logit_bias.items())
        try:
            prompt = _copy_ids(request.prompt, &r.num_prompt)
            r.prompt = prompt
            stop_ids = _copy_ids(request.stop_token_ids, &r.num_stop_token_ids)
            r.stop_token_ids = stop_ids
            if stop_bytes:
                stops = <c.xllm_text *>calloc(len(stop_bytes), sizeof(c.xllm_text))
                if stops == NULL:
                    raise MemoryError
                for i in range(len(stop_bytes)):
                    stops[i].data = <const char *><bytes>stop_bytes[i]
                    stops[i].size = len(stop_bytes[i])
                r.stop_strings = stops
                r.num_stop_strings = len(stop_bytes)
            if bias_items:
                biases = <c.xllm_logit_bias *>calloc(len(bias_items), sizeof(c.xllm_logit_bias))
                if biases == NULL:
                    raise MemoryError
                for i in range(len(bias_items)):
                    _in_range("logit_bias", bias_items[i][0], -(2**31), 2**31 - 1)
                    biases[i].token_id = bias_items[i][0]
                    biases[i].bias = bias_items[i][1]
                r.logit_biases = biases
                r.num_logit_biases = len(bias_items)
            _check(c.xllm_engine_submit(handle, &r, &request_id, &err), &err)
            return request_id
        finally:
            free(prompt)
            free(stop_ids)
            free(stops)
            free(biases)

    def cancel(self, request_id):
        cdef c.xllm_error err
        _check(c.xllm_engine_cancel(self._open(), request_id, &err), &err)

    @property
    def event_fd(self):
        return c.xllm_engine_event_fd(self._open())

    def take_events(self, request_id=0, timeout_s=0.0):
        cdef c.xllm_error err
        cdef c.xllm_status status = c.XLLM_STATUS_OK
        cdef c.xllm_events *batch = NULL
        cdef uint64_t wanted = request_id
        cdef double wait = 0
        cdef size_t i
        cdef c.xllm_engine *handle
        deadline = None if timeout_s < 0 else time.monotonic() + timeout_s
        while True:
            # note: waits in slices, so that Ctrl-C and close() by another thread are seen.
            handle = self._open()
            left = WAIT_SLICE_S if deadline is None else deadline - time.monotonic()
            wait = max(0.0, min(WAIT_SLICE_S, left))
            self._calls += 1
            with nogil:
                status = c.xllm_engine_take_events(handle, wanted, wait, &batch, &err)
            self._calls -= 1
            _check(status, &err)
            if batch != NULL or left <= WAIT_SLICE_S and deadline is not None:
                break
        if batch == NULL:
            return []
        try:
            return [_event(c.xllm_events_get(batch, i)) for i in range(c.xllm_events_count(batch))]
        finally:
            c.xllm_events_destroy(batch)

    def stream(self, request):
        request_id = self.submit(request, private=True)
        return self._stream(request_id)

    def _stream(self, request_id):
        finished = False
        try:
            while not finished:
                for event in self.take_events(request_id, -1.0):
                    finished = isinstance(event, types.FinishedEvent)
                    yield event
        finally:
            if not finished and self._handle != NULL:
                self.cancel(request_id)
                while not finished and self._handle != NULL:
                    finished = any(isinstance(e, types.FinishedEvent) for e in self.take_events(request_id, -1.0))

    def generate(self, prompt, *, add_special=True, parse_special=False, **options):
        sampling_names = types.SamplingParams.__dataclass_fields__
        sampling = {name: options.pop(name) for name in list(options) if name in sampling_names}
        ids = self._model.encode(prompt, add_special=add_special, parse_special=parse_special) \
            if isinstance(prompt, str) else prompt
        return self.stream(types.Request(prompt=ids, sampling=types.SamplingParams(**sampling), **options))

    def drain(self):
        c.xllm_engine_drain(self._open())

    def stats(self):
        cdef c.xllm_engine_stats s
        c.xllm_engine_get_stats(self._open(), &s)
        return types.EngineStats(
            num_running=s.num_running, num_waiting=s.num_waiting, slots_total=s.slots_total, slots_used=s.slots_used,
            blocks_total=s.blocks_total, blocks_used=s.blocks_used, blocks_cached=s.blocks_cached,
            num_steps=s.num_steps, num_prompt_tokens=s.num_prompt_tokens, num_cached_tokens=s.num_cached_tokens,
            num_generated_tokens=s.num_generated_tokens, num_requests_finished=s.num_requests_finished,
            num_requests_cancelled=s.num_requests_cancelled, num_requests_failed=s.num_requests_failed,
            num_preemptions=s.num_preemptions, last_step_s=s.last_step_s, heartbeat_age_s=s.heartbeat_age_s,
            cancel_steps_max=s.cancel_steps_max, workspace_bytes=s.workspace_bytes, is_draining=bool(s.is_draining),
            has_failed=bool(s.has_failed),
        )

    def slots(self):
        cdef c.xllm_slot_info s
        cdef int32_t index = 0
        found = []
        while c.xllm_engine_get_slot(self._open(), index, &s):
            found.append(types.SlotInfo(
                s.slot, s.epoch, types.SlotState(s.state), types.DecodeMode(s.decode_mode),
                s.request_id if s.request_id else None, s.num_tokens, s.num_blocks,
            ))
            index += 1
        return found

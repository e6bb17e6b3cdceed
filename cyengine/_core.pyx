# cython: language_level=3, embedsignature=True
"""The engine as Python objects, over the C ABI of ``xllm.h``.

Blocking calls release the GIL, and no thread of the engine ever takes it: results wait in the core until they are
asked for. Documentation of the public names is in ``_core.pyi``.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from cyengine cimport c_xllm as c

import operator
import os
import time

from cyengine import errors, types


cdef extern from "<stdio.h>" nogil:
    int dprintf(int fd, const char *format, ...)

cdef extern from "lost_file.h" nogil:
    int c_exit_on_lost_file "exit_on_lost_file"(int fd, int exit_status)


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


def exit_on_lost_file(int fd=2, int exit_status=1):
    problem = c_exit_on_lost_file(fd, exit_status)
    if problem:
        raise OSError(problem, os.strerror(problem))


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
            copy[i] = operator.index(value)  # a float is no token id
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
    out.max_token_gap_s = config.max_token_gap_s
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
            _text(e.text, e.text_size), e.logprob, candidates, bool(e.wants_mask), e.rank if e.rank else None,
        )
    if e.kind == c.XLLM_EVENT_ACCEPTED:
        return types.AcceptedEvent(
            e.request_id, e.slot, e.epoch, types.DecodeMode(e.decode_mode), e.seed, e.max_tokens, e.num_prompt_tokens,
            e.num_cached_tokens, e.queue_s, bool(e.wants_mask),
        )
    if e.kind == c.XLLM_EVENT_PREFILL:
        return types.PrefillEvent(e.request_id, e.num_prompt_tokens, e.num_cached_tokens, e.num_computed_tokens)
    return types.FinishedEvent(
        e.request_id, types.Status(e.status), types.FinishReason(e.finish_reason),
        e.matched_token_id if e.matched_token_id >= 0 else None, e.matched_stop if e.matched_stop >= 0 else None,
        _text(e.text, e.text_size), e.message.decode("utf-8", "replace") if e.message != NULL else "",
        e.num_prompt_tokens, e.num_cached_tokens, e.num_generated_tokens, e.queue_s, e.prefill_s, e.decode_s, e.ttft_s,
        e.num_preemptions, _details(e.details) if e.details != NULL else {},
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
                has_weights=bool(i.has_weights), num_layers=i.num_layers, hidden_size=i.hidden_size,
                intermediate_size=i.intermediate_size,
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
            pieces = [(piece.text, -1 if piece.is_plain else piece.trusted) for piece in text]
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


# ---------------------------------------------------------------- requests

cdef class _MaskArgs:
    # Several types.TokenMask as C structs, which point into the buffers that it holds.
    cdef c.xllm_token_mask *masks
    cdef size_t count
    cdef Py_buffer *_views
    cdef size_t _num_views

    def __init__(self, entries):
        cdef size_t i
        cdef size_t num = len(entries)
        if not num:
            return
        self.masks = <c.xllm_token_mask *>calloc(num, sizeof(c.xllm_token_mask))
        self._views = <Py_buffer *>calloc(num, sizeof(Py_buffer))
        if self.masks == NULL or self._views == NULL:
            raise MemoryError
        for i in range(num):
            entry = entries[i]
            _in_range("request_id", entry.request_id, 0, 2**64 - 1)
            _in_range("token_index", entry.token_index, 0, 2**32 - 1)
            PyObject_GetBuffer(entry.words, &self._views[i], PyBUF_SIMPLE)
            self._num_views = i + 1
            if self._views[i].len % sizeof(uint32_t):
                raise errors.InvalidArgumentError(
                    f"masks[{i}]: expected whole 32-bit words, found {self._views[i].len} bytes",
                    details={"field": "masks", "entry": str(i)},
                )
            self.masks[i].request_id = entry.request_id
            self.masks[i].token_index = entry.token_index
            self.masks[i].words = <const uint32_t *>self._views[i].buf
            self.masks[i].num_words = <size_t>self._views[i].len // sizeof(uint32_t)
        self.count = num

    def __dealloc__(self):
        cdef size_t i
        for i in range(self._num_views):
            PyBuffer_Release(&self._views[i])
        free(self._views)
        free(self.masks)


cdef int _fill_sampling(object sampling, c.xllm_sampling_params *out) except -1:
    _in_range("top_k", sampling.top_k, -(2**31), 2**31 - 1)
    if sampling.seed is not None:
        _in_range("seed", sampling.seed, 0, 2**64 - 1)
    c.xllm_sampling_params_init(out)
    out.temperature = sampling.temperature
    out.top_k = sampling.top_k
    out.top_p = sampling.top_p
    out.min_p = sampling.min_p
    out.repetition_penalty = sampling.repetition_penalty
    out.frequency_penalty = sampling.frequency_penalty
    out.presence_penalty = sampling.presence_penalty
    out.has_seed = sampling.seed is not None
    out.seed = 0 if sampling.seed is None else sampling.seed
    return 0


cdef void _fill_cache(bytes salt, bint bypass, c.xllm_cache_options *out):
    # The salt's bytes are the caller's to keep.
    out.salt = salt
    out.salt_size = len(salt)
    out.bypass = bypass


cdef class _RequestArgs:
    # A types.Request as the C struct, with the memory that it points into.
    cdef c.xllm_request r
    cdef int32_t *_prompt
    cdef int32_t *_stop_ids
    cdef c.xllm_text *_stops
    cdef c.xllm_logit_bias *_biases
    cdef object _keep
    cdef bytes _salt

    def __init__(self, request, private):
        cdef size_t i
        for name in ("max_tokens", "min_tokens"):
            _in_range(name, getattr(request, name), 0, 2**32 - 1)
        _in_range("priority", request.priority, -(2**31), 2**31 - 1)
        if request.num_logprobs is not None:
            _in_range("num_logprobs", request.num_logprobs, 0, 2**31 - 1)
        c.xllm_request_init(&self.r)
        _fill_sampling(request.sampling, &self.r.sampling)
        self.r.decode_mode = <c.xllm_decode_mode><int>request.decode_mode
        self.r.delivery = c.XLLM_DELIVERY_PRIVATE if private else c.XLLM_DELIVERY_SHARED
        self.r.max_tokens = request.max_tokens
        self.r.min_tokens = request.min_tokens
        self.r.ignore_eos = request.ignore_eos
        self.r.num_logprobs = -1 if request.num_logprobs is None else request.num_logprobs
        self.r.priority = request.priority
        self.r.max_queue_s = request.max_queue_s
        self.r.max_duration_s = request.max_duration_s
        self.r.is_constrained = request.is_constrained
        _in_range("tenant", request.tenant, 0, 2**64 - 1)
        self.r.tenant = request.tenant
        self._salt = bytes(request.cache_salt)
        _fill_cache(self._salt, request.bypass_cache, &self.r.cache)
        self._prompt = _copy_ids(request.prompt, &self.r.num_prompt)
        self.r.prompt = self._prompt
        self._stop_ids = _copy_ids(request.stop_token_ids, &self.r.num_stop_token_ids)
        self.r.stop_token_ids = self._stop_ids
        if isinstance(request.stop_strings, (str, bytes)):
            raise errors.InvalidArgumentError(
                "stop_strings: expected a sequence of strings, found one string: put it in a list",
                details={"field": "stop_strings"},
            )
        self._keep = [stop.encode("utf-8", "surrogatepass") for stop in request.stop_strings]
        if self._keep:
            self._stops = <c.xllm_text *>calloc(len(self._keep), sizeof(c.xllm_text))
            if self._stops == NULL:
                raise MemoryError
            for i in range(len(self._keep)):
                self._stops[i].data = <const char *><bytes>self._keep[i]
                self._stops[i].size = len(self._keep[i])
            self.r.stop_strings = self._stops
            self.r.num_stop_strings = len(self._keep)
        bias_items = list(request.logit_bias.items())
        if bias_items:
            self._biases = <c.xllm_logit_bias *>calloc(len(bias_items), sizeof(c.xllm_logit_bias))
            if self._biases == NULL:
                raise MemoryError
            for i in range(len(bias_items)):
                _in_range("logit_bias", bias_items[i][0], -(2**31), 2**31 - 1)
                self._biases[i].token_id = bias_items[i][0]
                self._biases[i].bias = bias_items[i][1]
            self.r.logit_biases = self._biases
            self.r.num_logit_biases = len(bias_items)

    def __dealloc__(self):
        free(self._prompt)
        free(self._stop_ids)
        free(self._stops)
        free(self._biases)


# ---------------------------------------------------------------- slots

cdef c.xllm_slot_ref _slot_ref(object slot) except *:
    cdef c.xllm_slot_ref ref
    _in_range("slot", slot.index, -(2**31), 2**31 - 1)
    _in_range("epoch", slot.epoch, 0, 2**64 - 1)
    ref.slot = slot.index
    ref.epoch = slot.epoch
    return ref


cdef object _slot_info(const c.xllm_slot_info *s):
    return types.SlotInfo(
        s.slot, s.epoch, types.SlotState(s.state), types.DecodeMode(s.decode_mode),
        s.request_id if s.request_id else None, s.num_tokens, s.num_blocks, bool(s.is_acquired), s.lease_left_s,
        s.owned_s,
    )


# ---------------------------------------------------------------- engine

cdef class Engine:
    cdef c.xllm_engine *_handle
    cdef Model _model
    cdef bint _owns_model
    cdef object _info
    cdef size_t _row_bytes  # of logits
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
        self._row_bytes = self._model.info.vocab_size * sizeof(float)

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
        cdef uint64_t request_id = 0
        cdef c.xllm_engine *handle = self._open()
        cdef _RequestArgs args = _RequestArgs(request, private)
        _check(c.xllm_engine_submit(handle, &args.r, &request_id, &err), &err)
        return request_id

    def submit_outputs(self, request, num_outputs, *, private=False):
        cdef c.xllm_error err
        cdef c.xllm_engine *handle = self._open()
        cdef _RequestArgs args = _RequestArgs(request, private)
        cdef uint64_t *ids = NULL
        cdef size_t count
        _in_range("num_outputs", num_outputs, 1, 128)
        count = num_outputs
        try:
            ids = <uint64_t *>calloc(count, sizeof(uint64_t))
            if ids == NULL:
                raise MemoryError
            _check(c.xllm_engine_submit_outputs(handle, &args.r, count, ids, &err), &err)
            return [ids[i] for i in range(count)]
        finally:
            free(ids)

    def count_cached(self, token_ids, *, decode_mode=types.DecodeMode.AUTO, cache_salt=b"", bypass_cache=False):
        cdef c.xllm_error err
        cdef c.xllm_cache_options cache
        cdef uint32_t count = 0
        cdef size_t num = 0
        cdef c.xllm_engine *handle = self._open()
        cdef bytes salt = bytes(cache_salt)
        cdef int32_t *prompt = _copy_ids(token_ids, &num)
        _fill_cache(salt, bypass_cache, &cache)
        try:
            _check(
                c.xllm_engine_count_cached(
                    handle, prompt, num, <c.xllm_decode_mode><int>decode_mode, &cache, &count, &err
                ),
                &err,
            )
            return count
        finally:
            free(prompt)

    def cancel(self, request_id):
        cdef c.xllm_error err
        _in_range("request_id", request_id, 0, 2**64 - 1)
        _check(c.xllm_engine_cancel(self._open(), request_id, &err), &err)

    def push_masks(self, masks):
        cdef c.xllm_error err
        cdef c.xllm_status status
        cdef c.xllm_engine *handle = self._open()
        cdef _MaskArgs args = _MaskArgs(list(masks))
        if not args.count:
            return
        self._calls += 1
        with nogil:
            status = c.xllm_engine_push_masks(handle, args.masks, args.count, &err)
        self._calls -= 1
        _check(status, &err)

    @property
    def event_fd(self):
        return c.xllm_engine_event_fd(self._open())

    def take_events(self, request_id=0, timeout_s=0.0):
        cdef c.xllm_error err
        cdef c.xllm_status status = c.XLLM_STATUS_OK
        cdef c.xllm_events *batch = NULL
        _in_range("request_id", request_id, 0, 2**64 - 1)
        cdef uint64_t wanted = request_id
        cdef double wait = 0
        cdef size_t i
        cdef c.xllm_engine *handle
        if timeout_s != timeout_s:
            raise errors.InvalidArgumentError("timeout_s is not a number", details={"field": "timeout_s"})
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
        return self._stream(self.submit(request, private=True))

    def _stream(self, request_id):
        events = self._events_of(request_id)
        next(events)  # into its try, so that closing or dropping it before the first event cancels the request too
        return events

    def _events_of(self, request_id):
        finished = False
        try:
            yield None
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
            has_failed=bool(s.has_failed), token_gap_bound_s=s.token_gap_bound_s, token_gap_max_s=s.token_gap_max_s,
            prefill_tokens_per_s=s.prefill_tokens_per_s,
        )

    def slots(self):
        cdef c.xllm_slot_info s
        cdef int32_t index = 0
        found = []
        while c.xllm_engine_get_slot(self._open(), index, &s):
            found.append(_slot_info(&s))
            index += 1
        return found

    def slot(self, index):
        cdef c.xllm_slot_info s
        _in_range("slot", index, -(2**31), 2**31 - 1)
        if not c.xllm_engine_get_slot(self._open(), index, &s):
            raise errors.NotFoundError(f"slot {index}: the engine has slots 0 to {self.info.max_slots - 1}")
        return _slot_info(&s)

    def acquire(self, decode_mode=types.DecodeMode.AUTO, *, lease_s=60.0, slot=None):
        cdef c.xllm_error err
        cdef c.xllm_acquire_options options
        cdef c.xllm_slot_info s
        c.xllm_acquire_options_init(&options)
        options.decode_mode = <c.xllm_decode_mode><int>decode_mode
        options.lease_s = lease_s
        if slot is not None:
            _in_range("slot", slot, 0, 2**31 - 1)
            options.slot = slot
        _check(c.xllm_engine_acquire(self._open(), &options, &s, &err), &err)
        return types.Slot(s.slot, s.epoch, types.DecodeMode(s.decode_mode))

    def renew(self, slot, lease_s=60.0):
        cdef c.xllm_error err
        cdef c.xllm_slot_info s
        cdef double lease = lease_s
        _check(c.xllm_engine_renew(self._open(), _slot_ref(slot), lease, &s, &err), &err)
        return _slot_info(&s)

    def release(self, slot):
        cdef c.xllm_error err
        cdef c.xllm_slot_info s
        _check(c.xllm_engine_release(self._open(), _slot_ref(slot), &s, &err), &err)
        return _slot_info(&s)

    def fork(self, slot, lease_s=60.0):
        cdef c.xllm_error err
        cdef c.xllm_slot_info s
        cdef double lease = lease_s
        _check(c.xllm_engine_fork(self._open(), _slot_ref(slot), lease, &s, &err), &err)
        return types.Slot(s.slot, s.epoch, types.DecodeMode(s.decode_mode))

    def submit_prefill(self, slot, token_ids, *, private=False, max_duration_s=0.0, cache_salt=b"", bypass_cache=False):
        cdef c.xllm_error err
        cdef c.xllm_prefill_options options
        cdef uint64_t request_id = 0
        cdef int32_t *prompt = NULL
        cdef c.xllm_engine *handle = self._open()
        cdef c.xllm_slot_ref ref = _slot_ref(slot)
        cdef bytes salt = bytes(cache_salt)
        c.xllm_prefill_options_init(&options)
        options.delivery = c.XLLM_DELIVERY_PRIVATE if private else c.XLLM_DELIVERY_SHARED
        options.max_duration_s = max_duration_s
        _fill_cache(salt, bypass_cache, &options.cache)
        try:
            prompt = _copy_ids(token_ids, &options.num_prompt)
            options.prompt = prompt
            _check(c.xllm_engine_prefill(handle, ref, &options, &request_id, &err), &err)
            return request_id
        finally:
            free(prompt)

    def prefill(self, slot, token_ids):
        for event in self._stream(self.submit_prefill(slot, token_ids, private=True)):
            if isinstance(event, types.FinishedEvent):
                if event.status is not types.Status.OK:
                    raise errors.error_from_status(event.status, event.message, event.details)
                return event

    def submit_decode_slot(self, slot, request, *, private=False):
        cdef c.xllm_error err
        cdef uint64_t request_id = 0
        cdef c.xllm_engine *handle = self._open()
        cdef _RequestArgs args = _RequestArgs(request, private)
        _check(c.xllm_engine_decode_slot(handle, _slot_ref(slot), &args.r, &request_id, &err), &err)
        return request_id

    def submit_decode_batch(self, entries, *, private=False):
        cdef c.xllm_error err
        cdef size_t i
        cdef size_t count
        cdef c.xllm_engine *handle = self._open()
        cdef c.xllm_slot_ref *refs = NULL
        cdef c.xllm_request *requests = NULL
        cdef uint64_t *ids = NULL
        pairs = list(entries)
        keep = [_RequestArgs(request, private) for _, request in pairs]
        count = len(pairs)
        try:
            refs = <c.xllm_slot_ref *>calloc(count + 1, sizeof(c.xllm_slot_ref))
            requests = <c.xllm_request *>calloc(count + 1, sizeof(c.xllm_request))
            ids = <uint64_t *>calloc(count + 1, sizeof(uint64_t))
            if refs == NULL or requests == NULL or ids == NULL:
                raise MemoryError
            for i in range(count):
                refs[i] = _slot_ref(pairs[i][0])
                requests[i] = (<_RequestArgs>keep[i]).r
            _check(c.xllm_engine_decode_batch(handle, refs, requests, count, ids, &err), &err)
            return [ids[i] for i in range(count)]
        finally:
            free(refs)
            free(requests)
            free(ids)

    def decode_step_slot(self, slot, sampling=None, *, logits=False):
        cdef c.xllm_error err
        cdef c.xllm_status status
        cdef c.xllm_sampling_params params
        cdef c.xllm_engine *handle = self._open()
        cdef c.xllm_slot_ref ref = _slot_ref(slot)
        cdef int32_t token = -1
        cdef float *row = NULL
        cdef size_t row_bytes = self._row_bytes
        _fill_sampling(types.SamplingParams() if sampling is None else sampling, &params)
        try:
            if logits:
                row = <float *>calloc(row_bytes, 1)
                if row == NULL:
                    raise MemoryError
            self._calls += 1
            with nogil:
                status = c.xllm_engine_decode_step_slot(handle, ref, &params, &token, row, &err)
            self._calls -= 1
            _check(status, &err)
            return types.SlotStep(token, PyBytes_FromStringAndSize(<char *>row, row_bytes) if logits else None)
        finally:
            free(row)

    def decode_step_batch(self, slots, sampling=None, *, logits=False):
        cdef c.xllm_error err
        cdef c.xllm_status status
        cdef c.xllm_engine *handle = self._open()
        cdef c.xllm_slot_ref *refs = NULL
        cdef c.xllm_sampling_params *params = NULL
        cdef int32_t *tokens = NULL
        cdef float *rows = NULL
        cdef size_t row_bytes = self._row_bytes
        cdef size_t i
        cdef size_t count
        members = list(slots)
        count = len(members)
        if sampling is None or isinstance(sampling, types.SamplingParams):
            choices = [sampling or types.SamplingParams()] * count
        else:
            choices = list(sampling)
        if len(choices) != count:
            raise errors.InvalidArgumentError(
                f"sampling: expected one for each of {count} slots, found {len(choices)}", details={"field": "sampling"}
            )
        try:
            refs = <c.xllm_slot_ref *>calloc(count + 1, sizeof(c.xllm_slot_ref))
            params = <c.xllm_sampling_params *>calloc(count + 1, sizeof(c.xllm_sampling_params))
            tokens = <int32_t *>calloc(count + 1, sizeof(int32_t))
            if logits:
                rows = <float *>calloc(count + 1, row_bytes)
            if refs == NULL or params == NULL or tokens == NULL or (logits and rows == NULL):
                raise MemoryError
            for i in range(count):
                refs[i] = _slot_ref(members[i])
                _fill_sampling(choices[i], &params[i])
            self._calls += 1
            with nogil:
                status = c.xllm_engine_decode_step_batch(handle, refs, params, count, tokens, rows, &err)
            self._calls -= 1
            _check(status, &err)
            return [
                types.SlotStep(
                    tokens[i], PyBytes_FromStringAndSize(<char *>rows + i * row_bytes, row_bytes) if logits else None
                )
                for i in range(count)
            ]
        finally:
            free(refs)
            free(params)
            free(tokens)
            free(rows)

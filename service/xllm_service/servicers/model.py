"""ModelService: what is served, and its tokenizer and chat template."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from xllm_client.v1 import model_service_pb2, model_service_pb2_grpc
from xllm_service import convert
from xllm_service.engine import AsyncEngine, Model
from xllm_service.errors import ServiceError
from xllm_service.servicers.prompt import aside
from xllm_service.servicers.roster import Hosted
from xllm_service.servicers.served import Served
from xllm_service.validation import validate_chat, validate_token_ids

_ROPE_THETA = 10000.0  # RoPE's base in a file that does not say (arXiv:2104.09864)
_MAX_VALUE = 4096  # characters of one metadata value


class ModelServicer(model_service_pb2_grpc.ModelServiceServicer):
    """Describes the model and applies its tokenizer; computes nothing else."""

    def __init__(self, served: Served) -> None:
        self._served = served

    async def ListModels(
        self, request: model_service_pb2.ListModelsRequest, context: Any
    ) -> model_service_pb2.ListModelsResponse:
        """The models served, in short."""
        is_draining = self._served.is_draining
        models = [summary(hosted, is_draining) for hosted in self._served.roster]
        return model_service_pb2.ListModelsResponse(models=models)

    async def GetModel(
        self, request: model_service_pb2.GetModelRequest, context: Any
    ) -> model_service_pb2.GetModelResponse:
        """Everything known about one model."""
        hosted = self._served.get(request.model)
        model = await describe(hosted, self._served.is_draining, include_metadata=request.include_metadata)
        return model_service_pb2.GetModelResponse(model=model)

    async def Tokenize(
        self, request: model_service_pb2.TokenizeRequest, context: Any
    ) -> model_service_pb2.TokenizeResponse:
        """Text to token ids."""
        model = self._served.get_model(request.model)

        def encode() -> model_service_pb2.TokenizeResponse:
            model.check_tokenizer()
            add_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            ids = model.encode(request.text, add_special=add_special, parse_special=request.parse_special)
            pieces = [model.piece(token_id) for token_id in ids] if request.include_pieces else ()
            return model_service_pb2.TokenizeResponse(token_ids=ids, pieces=pieces)

        return await aside(model, len(request.text), encode)

    async def Detokenize(
        self, request: model_service_pb2.DetokenizeRequest, context: Any
    ) -> model_service_pb2.DetokenizeResponse:
        """Token ids to text."""
        model = self._served.get_model(request.model)
        model.check_tokenizer()
        ids = validate_token_ids(request.token_ids, "token_ids", model.info.vocab_size)

        def decode() -> model_service_pb2.DetokenizeResponse:
            shown = ids if request.render_special else [i for i in ids if not model.is_control(i)]
            raw = b"".join(map(model.piece, shown))
            text = model.decode(ids, render_special=request.render_special)
            return model_service_pb2.DetokenizeResponse(text=text, raw=raw)

        return await aside(model, len(ids), decode)

    async def RenderChat(
        self, request: model_service_pb2.RenderChatRequest, context: Any
    ) -> model_service_pb2.RenderChatResponse:
        """The prompt that a conversation becomes."""
        model = self._served.get_model(request.model)
        chat = validate_chat(request.chat, self._served.config.max_chat_messages)

        def render() -> model_service_pb2.RenderChatResponse:
            pieces = model.render(
                chat.messages,
                tools=chat.tools,
                add_generation_prompt=chat.add_generation_prompt,
                arguments=chat.arguments,
            )
            model.check_tokenizer()
            ids = model.encode_pieces(pieces) if request.include_token_ids else ()
            return model_service_pb2.RenderChatResponse(text="".join(piece.text for piece in pieces), token_ids=ids)

        return await model.in_worker(render)


def summary(hosted: Hosted, is_draining: bool) -> model_service_pb2.ModelSummary:
    """Return a model in short; of one that is still loading, its name."""
    if not hosted.is_loaded:
        return model_service_pb2.ModelSummary(name=hosted.name, state=model_service_pb2.MODEL_STATE_LOADING)
    engine = hosted.engine
    info = engine.model.info
    if engine.problem():
        state = model_service_pb2.MODEL_STATE_FAILED
    elif is_draining or hosted.is_ending:
        state = model_service_pb2.MODEL_STATE_DRAINING
    else:
        state = model_service_pb2.MODEL_STATE_READY
    return model_service_pb2.ModelSummary(
        name=hosted.name,
        state=state,
        digest=engine.model.digest.value,
        architecture=info.architecture,
        display_name=info.name,
        decode_mode=convert.decode_mode(int(engine.info.decode_mode)),
        size_bytes=info.file_bytes,
        num_parameters=info.num_params,
        context_length=info.context_length,
        max_seq_len=engine.info.max_seq_len,
    )


async def describe(hosted: Hosted, is_draining: bool, *, include_metadata: bool = False) -> model_service_pb2.Model:
    """Return everything known about a loaded model."""
    model = await asyncio.to_thread(_describe, hosted.engine, include_metadata)
    model.summary.CopyFrom(summary(hosted, is_draining))
    return model


def _describe(engine: AsyncEngine, include_metadata: bool) -> model_service_pb2.Model:
    model = engine.model
    info = model.info
    found = model.facts()
    facts = {fact.name: fact for fact in found}
    keys = {entry.key.removeprefix(f"{info.architecture}."): entry.value_json for entry in model.metadata()}
    tensors = model.tensors()
    message = model_service_pb2.Model(
        shape=model_service_pb2.ModelShape(
            num_layers=info.num_layers,
            hidden_size=info.hidden_size,
            intermediate_size=info.intermediate_size,
            num_heads=info.num_heads,
            num_kv_heads=info.num_kv_heads,
            head_dim=info.head_dim,
            rope_dim=int(keys.get("rope.dimension_count", info.head_dim)),
            rope_theta=float(keys.get("rope.freq_base", _ROPE_THETA)),
            num_head_rows=info.vocab_size,
            has_tied_head=not any(tensor.name == "output.weight" for tensor in tensors),
        ),
        tensor_types=_tensor_types(tensors),
        end_of_generation=_end_tokens(model),
        plan=convert.plan_message(
            engine.info.plan, convert.plan_context(engine.info), loaded=map(int, engine.loaded_modes)
        ),
        inferred=[
            model_service_pb2.InferredFact(name=fact.name, value=fact.value, source=fact.source) for fact in found
        ],
    )
    try:
        model.check_tokenizer()
        message.tokenizer.CopyFrom(_tokenizer(model, facts))
    except ServiceError as error:
        message.no_tokenizer_reason = error.message
    if info.chat_template:
        message.chat_template.source = info.chat_template
        message.chat_template.origin = "tokenizer.chat_template"
        message.chat_template.uses_tools = "tools" in info.chat_template
    if include_metadata:
        message.metadata.extend(
            model_service_pb2.MetadataEntry(key=entry.key, type=entry.type, value=_shown(entry.value_json))
            for entry in model.metadata()
        )
    return message


def _shown(value: str) -> str:
    return value if len(value) <= _MAX_VALUE else value[: _MAX_VALUE - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _tensor_types(tensors: Any) -> list[model_service_pb2.TensorTypeUse]:
    uses: dict[str, model_service_pb2.TensorTypeUse] = defaultdict(model_service_pb2.TensorTypeUse)
    for tensor in tensors:
        use = uses[tensor.dtype.upper()]
        use.type = tensor.dtype.upper()
        use.num_tensors += 1
        num_elements = 1
        for dim in tensor.dims:
            num_elements *= dim
        use.num_elements += num_elements
        use.size_bytes += tensor.size_bytes
    return sorted(uses.values(), key=lambda use: -use.size_bytes)


def _end_tokens(model: Model) -> list[model_service_pb2.EndOfGenerationToken]:
    tokens: dict[int, model_service_pb2.EndOfGenerationToken] = {}
    for end in model.end_tokens():
        token = tokens.setdefault(end.token_id, model_service_pb2.EndOfGenerationToken(id=end.token_id, text=end.text))
        token.sources.append(end.source)
    return list(tokens.values())


def _tokenizer(model: Model, facts: Any) -> model_service_pb2.TokenizerInfo:
    info = model.info
    tokenizer = model_service_pb2.TokenizerInfo(
        model=info.tokenizer_model,
        pre=info.pretokenizer,
        vocab_size=info.num_real_tokens,
        adds_bos=info.add_bos,
    )
    if info.bos_token_id is not None:
        tokenizer.bos_token_id = info.bos_token_id
    for name, target in (("pretokenizer", "pre_source"), ("add_bos", "adds_bos_source")):
        if name in facts:
            setattr(tokenizer, target, facts[name].source)
    return tokenizer

"""The second transport: `vllm.LLM` in this process behind the same type as servers that are asked by HTTP.

What they are asked and what they answer is the same: bodies and answers are made by vLLM's own serving classes, and
control requests have the names of its server's. Only no connection is made. The engine is `engine`'s; called by
`online`.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tracegrad.errors import ArgumentError, ServerError
from tracegrad.rollout.engine import Engine
from tracegrad.rollout.http import Answer
from tracegrad.rollout.server import Servers

HERE = "http://localhost:0"
"""What stands where others have a URL; nothing can be asked there."""
REFUSED = 400


class Inside(Servers):
    """An engine of this process as the only server of a run.

    Args:
        engine: with the policy.
        model: the name that it is asked for.
        limits: as of `Servers`: timeout_s, retries, failures.
    """

    def __init__(self, engine: Engine, *, model: str, **limits: Any) -> None:
        super().__init__([HERE], model=model, **limits)
        self.engine = engine

    async def __aenter__(self) -> "Inside":
        self._wire = EngineWire(self.engine, self.model)
        return self

    async def where(self, session: str) -> str:
        """Refused: an agent that brings its own client needs an address."""
        raise ServerError(
            "the policy is served in this process and has no address. An agent that asks by policy.base_url cannot "
            "reach it. Ask by policy.chat, or leave out servers='in-process'."
        )

    async def sleep(self, level: int = 1) -> None:
        """Gives the device's memory back while nothing is played: level 1 keeps the weights in the host's.

        Raises:
            ArgumentError: where there is no CUDA: vLLM would say yes and keep all of it.
        """
        await self._on_cuda("sleep", lambda llm: llm.sleep(level=level))

    async def wake(self) -> None:
        """Takes it back."""
        await self._on_cuda("wake_up", lambda llm: llm.wake_up())

    async def _on_cuda(self, name: str, work: Callable[[Any], Any]) -> None:
        from vllm.platforms import current_platform

        if not current_platform.is_cuda():
            raise ArgumentError(
                f"{name} is asked of vLLM on {current_platform.device_type}, which gives no memory back although it "
                "says so. Leave it out; it is for CUDA."
            )
        await asyncio.wrap_future(self.engine.do(work))


class EngineWire:
    """What answers requests in place of a connection.

    Args:
        engine: asked.
        model: the name of the model below any adapter.
    """

    def __init__(self, engine: Engine, model: str) -> None:
        self.engine = engine
        self.serving = _Serving(engine, model)
        do = engine.do
        self._roads: dict[str, Callable[[dict[str, Any], dict[str, str]], Awaitable[Any] | Any]] = {
            "/v1/chat/completions": lambda body, _: self.serving.chat(body),
            "/v1/completions": lambda body, _: self.serving.complete(body),
            "/inference/v1/generate": lambda body, _: self.serving.generate(body),
            "/v1/chat/completions/derender": lambda body, _: self.serving.derender(body),
            "/v1/models": lambda body, _: self.serving.list_models(),
            "/v1/load_lora_adapter": lambda body, _: self.serving.load(body),
            "/v1/unload_lora_adapter": lambda body, _: self.serving.unload(body),
            "/health": lambda body, _: do(lambda llm: None),
            "/is_paused": lambda body, _: {"is_paused": engine.paused},
            "/pause": _pause(engine),
            "/resume": lambda body, _: engine.resume(),
            "/init_weight_transfer_engine": lambda body, _: do(lambda llm: llm.init_weight_transfer_engine(body)),
            "/start_weight_update": lambda body, _: do(lambda llm: llm.start_weight_update()),
            "/update_weights": lambda body, _: do(lambda llm: llm.update_weights(body)),
            "/finish_weight_update": lambda body, _: do(lambda llm: llm.finish_weight_update(**body)),
            "/weight_info": lambda body, _: do(lambda llm: {"weight_version": llm.get_weight_version()}),
            "/reset_prefix_cache": lambda body, _: do(lambda llm: {"success": llm.reset_prefix_cache()}),
            "/collective_rpc": lambda body, _: do(lambda llm: {"results": llm.collective_rpc(**body)}),
        }

    async def close(self) -> None:
        """Nothing is open; the engine is its maker's to close."""

    async def request(
        self, method: str, url: str, path: str, data: bytes | None, *, timeout_s: float, **_: Any
    ) -> Answer:
        """As `http.Wire.request`: an answer or why there is none, within the time; raises nothing but cancellation."""
        started = time.monotonic()
        parts = urlsplit(path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        road = self._roads.get(parts.path)
        if road is None:
            return Answer(url, 404, {"error": f"{parts.path} is not served in this process"}, 0.0)
        try:
            found = await asyncio.wait_for(_given(road(json.loads(data) if data else {}, query)), timeout_s)
        except asyncio.TimeoutError:
            seconds = time.monotonic() - started
            return Answer(url, 0, None, seconds, f"no answer within {seconds:.1f} s", silent=True)
        except Exception as error:  # of vLLM, which raises what it likes
            status = REFUSED if isinstance(error, (ValueError, TypeError, ArgumentError)) else 500
            words = f"{type(error).__name__}: {error}"
            return Answer(url, status, {"error": words}, time.monotonic() - started)
        status, body = found if isinstance(found, tuple) else (200, found)
        return Answer(url, status, body, time.monotonic() - started)


class _Serving:
    """vLLM's own serving classes over the engine: what it answers is what its server would."""

    def __init__(self, engine: Engine, model: str) -> None:
        from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
        from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
        from vllm.entrypoints.openai.models.protocol import BaseModelPath
        from vllm.entrypoints.openai.models.serving import OpenAIServingModels
        from vllm.entrypoints.scale_out.derender.serving import ServingDerender
        from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
        from vllm.renderers.online_derenderer import OnlineDerenderer
        from vllm.renderers.online_renderer import OnlineRenderer

        known: Any = engine
        told: dict[str, Any] = {"request_logger": None}
        chat: dict[str, Any] = {
            "chat_template": None,
            "chat_template_content_format": "auto",
            "enable_auto_tools": bool(engine.arguments.get("enable_auto_tool_choice")),
            "tool_parser": engine.arguments.get("tool_call_parser"),
            "reasoning_parser": engine.vllm_config.structured_outputs_config.reasoning_parser,
        }
        name = str(engine.model_config.model)
        self.models = OpenAIServingModels(known, [BaseModelPath(name=model, model_path=name)])
        renderer = OnlineRenderer(engine.model_config, engine.renderer, **told, **chat)
        parser = OnlineDerenderer(engine.model_config, engine.renderer, **told, **chat)
        chat["reasoning_parser"] = chat["reasoning_parser"] or ""
        self._chat = OpenAIServingChat(known, self.models, "assistant", online_renderer=renderer, **told, **chat)
        self._complete = OpenAIServingCompletion(known, self.models, online_renderer=renderer, **told)
        self._generate = ServingTokens(known, self.models, renderer, **told)
        self._derender = ServingDerender(self.models, parser, **told)

    async def chat(self, body: dict[str, Any]) -> tuple[int, Any]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        return _body(await self._chat.create_chat_completion(ChatCompletionRequest(**body)))

    async def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        return _body(await self._complete.create_completion(CompletionRequest(**body)))

    async def generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

        return _body(await self._generate.serve_tokens(GenerateRequest(**body)))

    async def derender(self, body: dict[str, Any]) -> tuple[int, Any]:
        from vllm.entrypoints.scale_out.token_in_token_out.protocol import DerenderChatRequest

        return _body(await self._derender.derender_chat_response(DerenderChatRequest(**body)))

    async def list_models(self) -> tuple[int, Any]:
        return _body(await self.models.show_available_models())

    async def load(self, body: dict[str, Any]) -> tuple[int, Any]:
        from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

        return _body(await self.models.load_lora_adapter(LoadLoRAAdapterRequest(**body)))

    async def unload(self, body: dict[str, Any]) -> tuple[int, Any]:
        from vllm.entrypoints.serve.lora.protocol import UnloadLoRAAdapterRequest

        return _body(await self.models.unload_lora_adapter(UnloadLoRAAdapterRequest(**body)))


def _pause(engine: Engine) -> Callable[[dict[str, Any], dict[str, str]], Any]:
    def paused(_: dict[str, Any], query: dict[str, str]) -> Any:
        if query.get("mode") != "keep":
            raise ArgumentError(f"mode is {query.get('mode')!r}. Requests under way would be lost. Pause with keep.")
        return engine.pause(query.get("clear_cache", "true") != "false")

    return paused


async def _given(found: Any) -> Any:
    if isinstance(found, (dict, tuple)):
        return found
    return await (found if asyncio.iscoroutine(found) else asyncio.wrap_future(found))


def _body(response: Any) -> tuple[int, Any]:
    """Status and JSON of what a serving class gives; an error says its own status."""
    if isinstance(response, str):
        return 200, {"message": response}
    error = getattr(response, "error", None)
    return (int(error.code) if error is not None else 200), response.model_dump(mode="json")

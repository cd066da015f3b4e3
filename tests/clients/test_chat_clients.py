"""Chat clients against a running server: one class per client, one test per journey."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import Any, Literal

import agents
import instructor
import litellm
import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What is the weather in Paris?"
"""scripted_server.py has the model call `get_weather`, and repeat what it returned."""
RESULT = "sunny, 21 degrees"
ANSWER = f"The weather in Paris: {RESULT}."
QUESTION_ROME = "What is the weather in Rome?"
"""The same, but the model writes its last answer itself."""
DEMAND = "Report some weather."
"""Not scripted: the model writes what the request forces it to."""
CODE = "Write a class Job with name: str."
LIMIT = 200


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    sunny: bool


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the weather of a city."""
    return RESULT


def report_weather(city: Literal["Paris", "Rome"], sunny: bool) -> str:
    """Report the weather of a city."""
    return f"{city} {sunny}"


def definition(strict: bool | None = None) -> dict[str, Any]:
    """Return the tool `get_weather` in OpenAI's form."""
    city = {"type": "string", "enum": ["Paris", "Rome"]}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"], "additionalProperties": False}
    function: dict[str, Any] = {"name": "get_weather", "description": "Return the weather.", "parameters": schema}
    return {"type": "function", "function": function | ({} if strict is None else {"strict": strict})}


def asked(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def check_call(call: Any, name: str = "get_weather") -> None:
    """Check a call in the form of OpenAI's client and of litellm."""
    assert call.function.name == name
    arguments = json.loads(call.function.arguments)
    assert arguments.pop("city") in {"Paris", "Rome"}
    assert all(isinstance(value, bool) for value in arguments.values())


class TestOpenai:
    @pytest.fixture
    def client(self, url):
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)

    def test_chat(self, client):
        with client.chat.completions.stream(model="demo", messages=asked(CODE), max_tokens=LIMIT) as stream:
            texts = [event.delta for event in stream if event.type == "content.delta"]
            done = stream.get_final_completion()
        assert "class Job" in "".join(texts) == done.choices[0].message.content

    def test_tool_turns(self, client):
        messages = asked(QUESTION)
        for _ in range(2):
            given = {"model": "demo", "messages": messages, "tools": [definition()]}
            with client.chat.completions.stream(**given) as stream:
                message = stream.get_final_completion().choices[0].message
            messages.append(message.model_dump())
            for call in message.tool_calls or []:
                result = get_weather(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        assert message.content == ANSWER

    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
    @pytest.mark.parametrize("stream", [False, True])
    def test_forced_tool(self, client, choice, stream):
        given = {"model": "demo", "messages": asked(DEMAND), "tools": [definition()], "tool_choice": choice}
        if stream:
            with client.chat.completions.stream(**given) as events:
                done = events.get_final_completion()
        else:
            done = client.chat.completions.create(**given)
        check_call(done.choices[0].message.tool_calls[0])

    def test_strict_tool(self, client):
        given = {"model": "demo", "messages": asked(DEMAND), "tools": [openai.pydantic_function_tool(Weather)]}
        done = client.chat.completions.parse(**given, tool_choice="required", parallel_tool_calls=False)
        (call,) = done.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Weather)

    def test_structured_output(self, client):
        done = client.chat.completions.parse(model="demo", messages=asked(DEMAND), response_format=Weather)
        assert isinstance(done.choices[0].message.parsed, Weather)

    def test_schema_and_tools(self, client):
        given = {"model": "demo", "messages": asked(QUESTION), "tools": [definition(strict=True)]}
        done = client.chat.completions.parse(**given, response_format=Weather)
        check_call(done.choices[0].message.tool_calls[0])


class TestLlm:
    """The command line of `llm`, with a model that its configuration file names."""

    FUNCTION = f"def get_weather(city: str) -> str:\n    'Return the weather.'\n    return {RESULT!r}\n"

    @pytest.fixture
    def ask(self, url, tmp_path):
        model = {"model_id": "served", "model_name": "demo", "api_base": url}
        model |= {"supports_schema": True, "supports_tools": True}
        (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))  # JSON is YAML

        def ask(*arguments: str) -> str:
            command = [sys.executable, "-m", "llm", "-m", "served", *arguments]
            env = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
            done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
            assert done.returncode == 0, done.stderr
            return done.stdout

        return ask

    def test_chat(self, ask):
        assert "class Job" in ask(CODE)
        assert ask("--continue", "-o", "max_tokens", "60", "--no-stream", CODE).strip()

    def test_tool_turns(self, ask):
        assert ANSWER in ask("--functions", self.FUNCTION, QUESTION)

    def test_structured_output(self, ask):
        found = json.loads(ask("--schema", "sunny bool, warm bool", DEMAND))
        assert {name: type(value) for name, value in found.items()} == {"sunny": bool, "warm": bool}
        # Nothing in this schema says that the object has no other properties.
        schema = {"type": "object", "properties": Weather.model_json_schema()["properties"]}
        assert set(json.loads(ask("--no-stream", "--schema", json.dumps(schema), DEMAND))) <= {"city", "sunny"}


class TestLitellm:
    @pytest.fixture
    def ask(self, url):
        def ask(messages: list[Any], **fields: Any) -> Any:
            fields = {"max_retries": 0, "timeout": 60, **fields}
            return litellm.completion("openai/demo", messages, api_base=url, api_key="none", **fields)

        return ask

    def test_chat(self, ask):
        chunks = ask(asked(CODE), stream=True, max_tokens=LIMIT, stream_options={"include_usage": True})
        done = litellm.stream_chunk_builder(list(chunks))
        assert "class Job" in done.choices[0].message.content
        assert done.usage.completion_tokens > 10

    @pytest.mark.parametrize("dump", [False, True])
    def test_tool_turns(self, ask, dump):
        messages = asked(QUESTION)
        for _ in range(2):
            chunks = list(ask(messages, tools=[definition()], tool_choice="auto", stream=True))
            message = litellm.stream_chunk_builder(chunks).choices[0].message
            messages.append(message.model_dump() if dump else message)
            for call in message.tool_calls or []:
                result = get_weather(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": result})
        assert message.content == ANSWER

    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
    def test_forced_tool(self, ask, choice):
        done = ask(asked(DEMAND), tools=[definition()], tool_choice=choice)
        check_call(done.choices[0].message.tool_calls[0])

    def test_strict_tool(self, ask):
        given = {"tools": [definition(strict=True)], "parallel_tool_calls": False}
        check_call(ask(asked(QUESTION), **given).choices[0].message.tool_calls[0])
        check_call(ask(asked(DEMAND), tool_choice="required", **given).choices[0].message.tool_calls[0])

    def test_structured_output(self, ask):
        text = ask(asked(DEMAND), response_format=Weather).choices[0].message.content
        Weather.model_validate_json(text)

    def test_context_overflow(self, ask):
        with pytest.raises(litellm.ContextWindowExceededError):
            ask(asked("word " * 3000))


class TestLangchain:
    @pytest.fixture
    def model(self, url):
        return ChatOpenAI(model="demo", base_url=url, api_key="none", max_retries=0, timeout=60, stream_usage=True)

    def test_chat(self, model):
        chunks = list(model.stream(CODE, max_tokens=LIMIT))
        assert "class Job" in "".join(chunk.text for chunk in chunks)
        assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 10

    def test_tool_turns(self, model):
        bound, messages = model.bind_tools([get_weather]), [HumanMessage(QUESTION)]
        for _ in range(2):
            first, *rest = bound.stream(messages)
            message = sum(rest, first)
            messages.append(message)
            for call in message.tool_calls:
                messages.append(ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"]))
        assert message.text == ANSWER

    @pytest.mark.parametrize("choice", ["any", "report_weather"])
    def test_forced_tool(self, model, choice):
        (call, *_) = model.bind_tools([report_weather], tool_choice=choice).invoke(DEMAND).tool_calls
        assert call["name"] == "report_weather"
        Weather.model_validate(call["args"])

    def test_strict_tool(self, model):
        (call,) = model.bind_tools([get_weather], strict=True, parallel_tool_calls=False).invoke(QUESTION).tool_calls
        assert call["args"] == {"city": "Paris"}
        (call, *_) = model.bind_tools([report_weather], strict=True, tool_choice="any").invoke(DEMAND).tool_calls
        Weather.model_validate(call["args"])

    @pytest.mark.parametrize("method", ["function_calling", "json_schema"])
    def test_structured_output(self, model, method):
        found = model.with_structured_output(Weather, method=method).invoke(DEMAND)
        assert isinstance(found, Weather)


class TestInstructor:
    @pytest.fixture
    def ask(self, url):
        def ask(mode: instructor.Mode, wanted: Any, how: str = "create", **fields: Any) -> Any:
            plain = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
            completions = instructor.from_openai(plain, mode=mode).chat.completions
            fields = {"max_retries": 0, **fields}
            return getattr(completions, how)(model="demo", messages=asked(DEMAND), response_model=wanted, **fields)

        return ask

    def test_forced_tool(self, ask):
        assert isinstance(ask(instructor.Mode.TOOLS, Weather), Weather)
        *_, last = ask(instructor.Mode.TOOLS, Weather, "create_partial")
        Weather.model_validate(last.model_dump())

    def test_strict_tool(self, ask):
        assert isinstance(ask(instructor.Mode.TOOLS_STRICT, Weather), Weather)

    def test_structured_output(self, ask):
        assert isinstance(ask(instructor.Mode.JSON_SCHEMA, Weather), Weather)


class TestPydanticAi:
    @pytest.fixture
    def model(self, url):
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
        return OpenAIChatModel("demo", provider=OpenAIProvider(openai_client=client))

    @staticmethod
    def streamed(agent: Agent[Any, Any], question: str) -> Any:
        async def run() -> Any:
            async with agent.run_stream(question) as result:
                return await result.get_output()

        return asyncio.run(run())

    def test_chat(self, model):
        assert "class Job" in self.streamed(Agent(model, model_settings={"max_tokens": LIMIT}), CODE)

    def test_tool_turns(self, model):
        assert self.streamed(Agent(model, tools=[get_weather]), QUESTION) == ANSWER

    @pytest.mark.parametrize("stream", [False, True])
    def test_forced_tool(self, model, stream):
        agent = Agent(model, output_type=Weather, retries=0)  # the output's type is a tool that the agent requires
        found = self.streamed(agent, DEMAND) if stream else agent.run_sync(DEMAND).output
        assert isinstance(found, Weather)

    def test_strict_tool(self, model):
        agent = Agent(model, model_settings={"parallel_tool_calls": False})
        agent.tool_plain(get_weather, strict=True)
        assert agent.run_sync(QUESTION).output == ANSWER

    def test_structured_output(self, model):
        agent = Agent(model, output_type=NativeOutput(Weather), retries=0)
        assert isinstance(agent.run_sync(DEMAND).output, Weather)

    def test_schema_and_tools(self, model):
        agent = Agent(model, tools=[get_weather], output_type=NativeOutput(Weather), retries=0)
        assert isinstance(agent.run_sync(QUESTION_ROME).output, Weather)


class TestOpenaiAgents:
    @pytest.fixture
    def agent(self, url):
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
        model = agents.OpenAIChatCompletionsModel(model="demo", openai_client=client)

        def agent(**fields: Any) -> agents.Agent[Any]:
            return agents.Agent(name="clerk", model=model, **fields)

        return agent

    @staticmethod
    def run(agent: agents.Agent[Any], question: str) -> Any:
        async def run() -> Any:
            result = agents.Runner.run_streamed(agent, question)
            async for _ in result.stream_events():
                pass
            return result

        return asyncio.run(run())

    def test_chat(self, agent):
        result = self.run(agent(model_settings=agents.ModelSettings(max_tokens=LIMIT)), CODE)
        assert "class Job" in result.final_output

    def test_tool_turns(self, agent):
        # The library's tools are strict unless one says otherwise.
        tool = agents.function_tool(get_weather, strict_mode=False)
        assert self.run(agent(tools=[tool]), QUESTION).final_output == ANSWER

    def test_forced_tool(self, agent):
        tool = agents.function_tool(report_weather, strict_mode=False)
        settings = agents.ModelSettings(tool_choice="required")
        asked = agent(tools=[tool], model_settings=settings, tool_use_behavior="stop_on_first_tool")
        assert self.run(asked, DEMAND).final_output.split()[0] in {"Paris", "Rome"}

    def test_strict_tool(self, agent):
        settings = agents.ModelSettings(parallel_tool_calls=False)
        asked = agent(tools=[agents.function_tool(get_weather)], model_settings=settings)
        assert self.run(asked, QUESTION).final_output == ANSWER

    def test_structured_output(self, agent):
        assert isinstance(self.run(agent(output_type=Weather), DEMAND).final_output, Weather)

    def test_schema_and_tools(self, agent):
        asked = agent(tools=[agents.function_tool(get_weather)], output_type=Weather)
        assert isinstance(self.run(asked, QUESTION_ROME).final_output, Weather)

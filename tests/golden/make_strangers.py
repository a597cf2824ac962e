"""Makes the third set of strangers' files by their producers' own code, against `strangers_server.py` on loopback.

    python tests/golden/strangers_server.py 8765 examples/quickstart/model &   # needs torch and transformers
    python tests/golden/make_strangers.py tests/data/strangers/third NAME...   # names of functions below

Each name needs its own producer; inspect-ai and litellm do not want one openai, so that each has an interpreter.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

URL = "http://127.0.0.1:8765/v1"
OUT = Path(sys.argv[1])
QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Australia?": "Canberra",
    "What is 17 * 6?": "102",
    "Is 91 a prime number?": "7",
}
WEATHER = ["What is the weather in Oslo?", "Tell me the weather in Oslo, shortly."]
os.environ.update(OPENAI_API_KEY="none", OPENAI_BASE_URL=URL, OPENAI_API_BASE=URL, LITELLM_LOCAL_MODEL_COST_MAP="True")


def right(question, text):
    return float(QUESTIONS[question] in (text or ""))


def lines(name, rows):
    with open(OUT / name, "w") as file:
        file.writelines(json.dumps(row, default=str) + "\n" for row in rows)


def weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: name of the city
    """
    return f"{city}: 14 C, cloudy"


def openai_calls():
    """The openai client: request, response and a list of scores of the script's own; n=4, temperature 0.7."""
    from openai import OpenAI

    rows = []
    for q in QUESTIONS:
        asked = [{"role": "system", "content": "Answer in one line."}, {"role": "user", "content": q}]
        request = {"model": "gpt-4o-mini", "temperature": 0.7, "n": 4, "logprobs": True, "messages": asked}
        response = OpenAI().chat.completions.create(**request)
        judge = [right(q, each.message.content) for each in response.choices]
        rows.append({"request": request, "response": response.model_dump(), "judge": judge})
    lines("openai_calls.jsonl", rows)


def streams():
    """The openai client: the chunks of each streamed answer beside its messages, and a thumb."""
    from openai import OpenAI

    rows = []
    for q in QUESTIONS:
        for _ in range(3):
            asked = {"messages": [{"role": "user", "content": q}], "temperature": 1.0}
            told = {"model": "gpt-4o-mini", "logprobs": True, "stream": True, "stream_options": {"include_usage": True}}
            chunks = [each.model_dump(exclude_none=True) for each in OpenAI().chat.completions.create(**asked, **told)]
            text = "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks if each["choices"])
            rows.append({**asked, "chunks": chunks, "thumbs_up": bool(right(q, text))})
    lines("streams.jsonl", rows)


def litellm():
    """litellm's standard payload in a CustomLogger, temperature 0.9, the bundled model's logprobs, a grade."""
    import litellm
    from litellm.integrations.custom_logger import CustomLogger

    rows = []

    class Logger(CustomLogger):
        def log_success_event(self, kwargs, response_obj, start_time, end_time):
            line = kwargs["standard_logging_object"]
            said = response_obj.choices[0].message.content
            line["response_cost_failure_debug_info"] = None  # a stack trace, with folders
            line["metadata"]["grade"] = int(right(kwargs["messages"][-1]["content"], said) * 10)
            rows.append(line)

    litellm.callbacks = [Logger()]
    for q in QUESTIONS:
        for _ in range(4):
            asked = [{"role": "user", "content": q}]
            told = {"temperature": 0.9, "logprobs": True}
            litellm.completion(model="hosted_vllm/quickstart", api_base=URL, messages=asked, **told)
            time.sleep(0.3)
    time.sleep(3)
    lines("litellm.jsonl", rows)


def langsmith_runs():
    """langsmith: all runs of a chain as `list_runs` gives them, the feedback on the root."""
    os.environ.update(LANGSMITH_TRACING="true", LANGSMITH_ENDPOINT=URL[:-3], LANGSMITH_API_KEY="none")
    os.environ["LANGSMITH_PROJECT"] = "qa"
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.tracers.context import collect_runs
    from langchain_core.tracers.langchain import wait_for_all_tracers
    from langchain_openai import ChatOpenAI
    from langsmith import Client

    prompt = ChatPromptTemplate.from_messages([("system", "You are a helpful assistant."), ("human", "{question}")])
    chain, client = prompt | ChatOpenAI(model="gpt-4o-mini", temperature=0.9) | StrOutputParser(), Client()
    for q in QUESTIONS:
        for _ in range(3):
            with collect_runs() as seen:
                said = chain.invoke({"question": q})
            wait_for_all_tracers()
            root = seen.traced_runs[0].id
            client.create_feedback(run_id=root, key="correctness", score=right(q, said), trace_id=root)
    time.sleep(2)
    client.flush()
    rows = [run.model_dump() for run in client.list_runs(project_name="qa")]
    for row in rows:
        row["extra"]["runtime"]["platform"] = "Linux"
    lines("langsmith_runs.jsonl", rows)


def langgraph_threads():
    """langgraph's agent with a tool, `messages_to_dict`, and a rating of the user."""
    from langchain_core.messages import messages_to_dict
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    told = {"prompt": "You are a weather bot."}
    agent = create_react_agent(ChatOpenAI(model="gpt-4o-mini", temperature=0.7), [weather], **told)
    rows = []
    for q in WEATHER:
        for _ in range(5):
            said = agent.invoke({"messages": [("user", q)]})["messages"]
            rows.append({"messages": messages_to_dict(said), "user_rating": 5 if "14" in said[-1].content else 1})
    lines("langgraph_threads.jsonl", rows)


def facts():
    """inspect-ai: four epochs, logprobs of the bundled model, temperature 0.7."""
    from inspect_ai import Task
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, system_message

    asked = [Sample(input=q, target=target) for q, target in list(QUESTIONS.items())[:2]]
    task = Task(asked, solver=[system_message("Be brief."), generate()], scorer=includes(), epochs=4)
    evaluated(task, "facts", "quickstart", temperature=0.7, logprobs=True)


def weather_eval():
    """inspect-ai: an agent with a tool, a scorer of two values, three epochs, no logprobs."""
    from inspect_ai import Task
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import Score, mean, scorer
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool

    @tool
    def get_weather():
        async def execute(city: str):
            """Weather of a city.

            Args:
                city: name of the city
            """
            return weather(city)

        return execute

    @scorer(metrics={"right": [mean()], "short": [mean()]})
    def graded():
        async def score(state, target):
            text = state.output.completion
            return Score(value={"right": int("14" in text), "short": int(len(text) < 30)}, answer=text)

        return score

    asked = [Sample(input=q, target="14", id=at) for at, q in enumerate(WEATHER)]
    evaluated(
        Task(asked, solver=[use_tools(get_weather()), generate()], scorer=graded(), epochs=3), "weather", "gpt-4o-mini"
    )


def evaluated(task, name, model, **told):
    from inspect_ai import eval as run
    from inspect_ai.model import GenerateConfig, get_model

    with tempfile.TemporaryDirectory() as folder:
        served = get_model(f"openai-api/local/{model}", base_url=URL, api_key="x", config=GenerateConfig(**told))
        [log] = run(task, model=served, log_dir=folder, display="none", log_format="eval")
        (OUT / f"{name}.eval").write_bytes(Path(log.location.removeprefix("file://")).read_bytes())


def llm_logs():
    """llm: `llm logs list --json`; it keeps no reward."""
    import subprocess

    with tempfile.TemporaryDirectory() as home:
        told = f"- model_id: local\n  model_name: gpt-4o-mini\n  api_base: {URL}\n"
        Path(home, "extra-openai-models.yaml").write_text(told)

        def llm(*words):
            given = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "check": True}
            command = [str(Path(sys.executable).with_name("llm")), *words]
            return subprocess.run(command, env={**os.environ, "LLM_USER_PATH": home}, **given).stdout

        for q in QUESTIONS:
            for _ in range(3):
                llm("-m", "local", "-o", "temperature", "0.7", q)
        (OUT / "llm_logs.json").write_text(llm("logs", "list", "-n", "0", "--json"))


def dspy_history():
    """dspy: entries of `lm.history` with the metric beside."""
    import dspy

    lm = dspy.LM("openai/gpt-4o-mini", api_base=URL, api_key="x", temperature=0.9, cache=False)
    dspy.configure(lm=lm)
    program, rows = dspy.ChainOfThought("question -> answer"), []
    for q in QUESTIONS:
        for _ in range(3):
            said = program(question=q)
            rows.append({**lm.history[-1], "metric": right(q, said.answer)})
    plain = {"default": lambda each: each.model_dump() if hasattr(each, "model_dump") else str(each), "indent": 1}
    (OUT / "dspy_history.json").write_text(json.dumps(rows, **plain))


def smolagents_runs():
    """smolagents: `memory.get_full_steps()` of an agent that calls tools."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model, rows = OpenAIServerModel("gpt-4o-mini", api_base=URL, api_key="x", temperature=0.7), []
    for q in WEATHER:
        for _ in range(4):
            agent = ToolCallingAgent(tools=[tool(weather)], model=model, max_steps=4, verbosity_level=0)
            said = str(agent.run(q))
            rows.append({"task": q, "steps": agent.memory.get_full_steps(), "success": "14" in said})
    lines("smolagents_runs.jsonl", rows)


def camel_sharegpt():
    """camel-ai's ShareGPTDataCollector, with a tool, and stars of the user's."""
    from camel.agents import ChatAgent
    from camel.data_collectors import ShareGPTDataCollector
    from camel.models import ModelFactory
    from camel.toolkits import FunctionTool
    from camel.types import ModelPlatformType
    from camel.utils import BaseTokenCounter

    class Words(BaseTokenCounter):
        def count_tokens_from_messages(self, messages):
            return sum(len(str(each).split()) for each in messages)

        def encode(self, text):
            return [0 for _ in text.split()]

        def decode(self, ids):
            return ""

    def evaluate(expression: str) -> str:
        """Evaluate an expression.

        Args:
            expression (str): what to evaluate.
        """
        return "102"

    told = {"model_type": "gpt-4o-mini", "url": URL, "api_key": "x", "token_counter": Words()}
    platform = ModelPlatformType.OPENAI_COMPATIBLE_MODEL
    model = ModelFactory.create(model_platform=platform, model_config_dict={"temperature": 0.7}, **told)
    rows = []
    for q in QUESTIONS:
        for _ in range(4):
            tools = [FunctionTool(evaluate)] if "17" in q else None
            agent = ChatAgent("You are a terse expert.", model=model, tools=tools)
            collector = ShareGPTDataCollector().record(agent)
            collector.start()
            said = agent.step(q).msgs[0].content
            rows.append({**collector.convert(), "stars": int(1 + 4 * right(q, said))})
    (OUT / "camel_sharegpt.json").write_text(json.dumps(rows, ensure_ascii=False, indent=2))


def distilabel_dpo():
    """distilabel: two generations, UltraFeedback and FormatTextGenerationDPO."""
    from distilabel.models import OpenAILLM
    from distilabel.pipeline import Pipeline
    from distilabel.steps import FormatTextGenerationDPO, GroupColumns, LoadDataFromDicts
    from distilabel.steps.tasks import TextGeneration, UltraFeedback

    def llm():
        return OpenAILLM(model="gpt-4o-mini", base_url=URL, api_key="x", generation_kwargs={"temperature": 0.7})

    with Pipeline(name="pairs") as pipeline:
        load = LoadDataFromDicts(data=[{"instruction": q} for q in QUESTIONS] * 2)
        named = {"output_mappings": {"model_name": "generation_model"}}
        made = [TextGeneration(name=f"gen_{at}", llm=llm(), **named) for at in range(2)]
        columns = ["generation", "generation_model"]
        group = GroupColumns(columns=columns, output_columns=[f"{each}s" for each in columns])
        rate = UltraFeedback(name="rate", aspect="overall-rating", llm=llm())
        load >> made >> group >> rate >> FormatTextGenerationDPO()
    pipeline.run(use_cache=False)["default"]["train"].to_json(str(OUT / "distilabel_dpo.jsonl"))


def triage_calls():
    """The fourth set: the openai client with n=4, and a verdict on each choice one level below."""
    from openai import OpenAI

    rows = []
    for q in [*QUESTIONS, *QUESTIONS]:
        asked = [{"role": "system", "content": "Answer in one line."}, {"role": "user", "content": q}]
        request = {"model": "gpt-4o-mini", "temperature": 0.9, "n": 4, "logprobs": True, "messages": asked}
        response = OpenAI().chat.completions.create(**request)
        verdicts = [bool(right(q, each.message.content)) for each in response.choices]
        told = {"evaluation": {"per_choice_correct": verdicts}, "ts": time.time()}
        rows.append({"request": request, "response": response.model_dump(), **told})
    lines("triage_calls.jsonl", rows)


def chat_sessions():
    """The fourth set: sessions call by call, answers as chunks beside all messages so far, a thumb on the last call."""
    from openai import OpenAI

    rows = []
    for number, (q, answer) in enumerate([*QUESTIONS.items()] * 3):
        asked = [{"role": "system", "content": "Answer in one line."}]
        for turn, said in enumerate([q, "Are you sure?", "Shorter, please."][: 1 + number % 3]):
            asked.append({"role": "user", "content": said})
            told = {"stream": True, "stream_options": {"include_usage": True}}
            chunks = [*OpenAI().chat.completions.create(model="gpt-4o-mini", messages=asked, **told)]
            text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
            kept = [each.model_dump(exclude_none=True) for each in chunks]
            rows.append(
                {"session_id": f"s{number}", "turn": turn, "messages": [*asked], "chunks": kept, "thumbs": None}
            )
            asked.append({"role": "assistant", "content": text})
        rows[-1]["thumbs"] = "up" if answer in text else "down"
    (OUT / "chat_sessions.json").write_text(json.dumps(rows, indent=2))


def lc_threads():
    """The fourth set: threads of LangChain's messages, whose outcome is a word."""
    from langchain_core.messages import HumanMessage, messages_to_dict
    from langchain_openai import ChatOpenAI

    rows = []
    for number, (q, answer) in enumerate([*QUESTIONS.items()] * 4):
        talk = [HumanMessage(q)]
        talk.append(ChatOpenAI(model="gpt-4.1-mini", temperature=0.8).invoke(talk))
        outcome = "resolved" if answer in str(talk[-1].content) else "escalated"
        rows.append({"thread_id": f"t{number}", "messages": messages_to_dict(talk), "outcome": outcome})
    lines("lc_threads.jsonl", rows)


def rated_pairs():
    """The fourth set: pairs of messages with a rating of each side, by datasets."""
    from datasets import Dataset
    from openai import OpenAI

    rows = []
    for q in [*QUESTIONS] * 3:
        asked = [{"role": "user", "content": q}]
        made = OpenAI().chat.completions.create(model="m", messages=asked, n=2, temperature=1.0).choices
        good, bad = sorted((each.message.content for each in made), key=lambda text: -right(q, text))
        sides = {"chosen": good, "rejected": bad}
        row = {"prompt": asked, **{key: [{"role": "assistant", "content": text}] for key, text in sides.items()}}
        rows.append(row | {f"{key}_rating": 1.0 + 3 * right(q, text) for key, text in sides.items()})
    Dataset.from_list(rows).to_json(str(OUT / "rated_pairs.jsonl"))


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    for name in sys.argv[2:]:
        globals()[name]()

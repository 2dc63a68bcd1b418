"""The OpenAI server with drafts: front end, engine and worker are processes that each load the plugin."""

import re
from collections.abc import Callable
from dataclasses import replace

from openai import OpenAI
from server import serve

from engine import Report, Request, Run, mtp

PROMPT = list(range(10, 40))


def test_the_server_answers_as_the_engine_does(model: Callable[..., str], execute: Callable[[Run], Report]) -> None:
    request = Request(prompt=PROMPT, sampling={"max_tokens": 24})
    run = Run(model=model("dense"), runner="v2", speculative=mtp(3), rounds=[[request]])
    # At this level vLLM says which plugins it finds, in each process.
    with (
        serve(replace(run, environment={"VLLM_LOGGING_LEVEL": "DEBUG"})) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        options = {"model": run.model, "temperature": 0, "extra_body": {"ignore_eos": True}}
        completed = client.completions.create(prompt=PROMPT, max_tokens=24, **options)
        words = " ".join(f"t{token}" for token in PROMPT)
        chat = client.chat.completions.create(messages=[{"role": "user", "content": words}], max_tokens=8, **options)
        metrics, scraped = server.metrics(), server.scraped()
        log = server.log.read_text()
    text = execute(run).rounds[0].outputs[0].text
    assert completed.choices[0].text == text
    assert text.startswith(chat.choices[0].message.content)
    assert metrics["generation_tokens_total"] == 32
    assert 0 < metrics["spec_decode_num_accepted_tokens_total"] < metrics["spec_decode_num_draft_tokens_total"]
    assert "Using V2 Model Runner" in log
    # Nothing was asked of the plugin.
    assert "treewy" not in scraped
    assert "treewy:" not in log
    assert "Failed to load plugin" not in log
    loaded = re.findall(r"^\((\w+).* - treewy -> treewy\.vllm_plugin:register$", log, flags=re.MULTILINE)
    assert {"EngineCore", "VllmWorker"} <= set(loaded)

"""Programs of rows that ask for turns, for tests; loaded by their file's path."""

import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path


def ask(messages, **more):
    """The model's message, or the error's status and code."""
    try:
        return post("/v1/chat/completions", {"model": "m", "messages": messages, **more})["message"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["code"]


def post(path, body):
    """The choice that answers a request."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + path, json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]


def user(text):
    return {"role": "user", "content": text}


def counting(row):
    """Asks as often as its prompt says, and gives the sum of the answers."""
    messages, total = [{"role": "system", "content": "Count."}], 0
    for number in range(int(row.prompt)):
        messages += [user(f"number {number}")]
        messages += [ask(messages)]
        total += int(messages[-1]["content"])
    return total


def calling(row):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    messages = [{"role": "developer", "content": [{"type": "text", "text": "Add."}]}, user("2 + 3?")]
    said = ask(messages, tools=tools)
    (call,) = said["tool_calls"]
    total = sum(json.loads(call["function"]["arguments"])["of"])
    result = {"role": "tool", "tool_call_id": call["id"], "content": str(total)}
    # As many clients do, it leaves out what it doesn't read.
    messages += [{"role": "assistant", "content": None, "tool_calls": [call]}, result]
    return float(ask(messages, tools=tools)["content"])


def repeating(row):
    first, second = [ask([user("a")]) for _ in range(2)]
    assert first == second, (first, second)
    messages = [user("a"), first, user("b")]
    third = ask(messages)
    assert ask([user("a")]) == first
    return float(third["content"])


def forked(how, said):
    """A request that doesn't continue the conversation of one message and its answer."""
    forks = {"rewrites": [user("another"), said, user("b")], "compacts": [user("b")], "adds nothing": [user("a"), said]}
    more = {"tools": [{"type": "function", "function": {"name": "new"}}]} if how == "tools" else {}
    return forks.get(how, [user("a"), said, user("b")]), more


def forking(row):
    messages, more = forked(row.prompt, ask([user("a")]))
    assert ask(messages, **more) == (400, "fork")
    time.sleep(600)


def going_on(row):
    """Forks, continues from there, and repeats its first request."""
    said = ask([user("a")])
    messages, more = forked(row.prompt, said)
    assert ask([*messages, ask(messages, **more), user("c")], **more)["content"] == "z"
    return float(ask([user("a")]) == said)


def compacting(row):
    """Asks three times; the last request has a summary in place of what was before."""
    messages = [user("one")]
    messages += [ask(messages), user("two")]
    second = ask(messages)
    return float(ask([user(f"so far: {second['content']}"), second, user("three")])["content"])


def silent(row):
    return 1.0


def hanging(row):
    if row.prompt != "at once":
        ask([user("a")])
    time.sleep(600)


def failing(row):
    ask([user("a")])
    print("about to fail")
    raise RuntimeError(row.prompt)


def changing(row):
    """Asks three times at first, and once when it is started again."""
    mark = Path(row.prompt)
    num_turns = 1 if mark.exists() else 3
    mark.touch()
    messages = []
    for _ in range(num_turns):
        messages += [user("go")]
        messages += [ask(messages)]


def killing_the_server(row):
    ask([user("a")])
    os.kill(int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]), 9)
    time.sleep(600)


def counting_or_killing(row):
    return killing_the_server(row) if row.prompt == "kill" else counting(row)


def marked(row):
    tool = {"name": "add", "description": "adds <|im_end|>", "parameters": {"type": "object", "properties": {}}}
    ask([user("<|im_end|>")], tools=[{"type": "function", "function": tool}])


def answered(row):
    ask([user("a"), {"role": "assistant", "content": "b"}])


def by_tokens(row):
    """Asks twice by tokens, the second time with those of its prompt but the first behind the answer."""
    ids, total = json.loads(row.prompt), 0.0
    for _ in range(2):
        said = post("/inference/v1/generate", {"token_ids": ids, "sampling_params": {}})
        ids = [*ids, *said["token_ids"], *json.loads(row.prompt)[1:]]
        total += sum(one["logprob"] for one in said["logprobs"]["content"])
    return total


def noting(row):
    """Notes each start in the file that its prompt names, and asks three times."""
    with open(row.prompt, "a") as starts:
        starts.write(".")
    messages = []
    for number in range(3):
        messages += [user(f"number {number}")]
        messages += [ask(messages)]

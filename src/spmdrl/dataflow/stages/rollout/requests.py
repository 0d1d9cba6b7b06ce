"""Requests run through an engine, their responses handed on as they end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from spmdrl.engines.generation.protocol import GenerationEngine, Request, Response


def run_requests(
    engine: GenerationEngine, requests: Sequence[Request], is_enough: Callable[[], bool] | None = None
) -> Iterator[tuple[int, list[Response]]]:
    """Run the engine, and yield each request's number with those of its responses that ended in one engine step.

    Once `is_enough` says so before one of the engine's steps, what is unfinished is aborted and comes with the tokens
    that it has. Collective over the ranks that the engine computes with: those of a replica bring the same requests.
    """
    engine.submit(requests)
    request_of = {row: number for number, request in enumerate(requests) for row in request.rows}
    while engine.has_work and not (is_enough is not None and is_enough()):
        yield from by_request(engine.step(), request_of)
    if engine.has_work:
        yield from by_request(engine.abort(), request_of)


def by_request(responses: Iterable[Response], request_of: Mapping[int, int]) -> Iterator[tuple[int, list[Response]]]:
    """The responses of each request together, by its number."""
    together: dict[int, list[Response]] = {}
    for response in responses:
        number = request_of[response.row]
        # Taken out and put last: a request is where its last response is, so that groups are whole in that order.
        together[number] = [*together.pop(number, []), response]
    yield from together.items()

"""A request as text, as JSON, as a trace for Perfetto, and as a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps import term
from apps.chat import CONTROLS
from gpu import chrome, roofline
from gpu.page import Page, seconds_text
from gpu.roofline import microseconds, percent, place_of, quantity, rows_of

if TYPE_CHECKING:
    from apps.trace.request import Chosen, Request, Step
    from gpu.roofline import Row
    from gpu.tracing import Event

SHOWN = 12  # tokens of a line in the terminal


# --- rows ------------------------------------------------------------------------------------------------------------


def by_place(event: Event) -> str:
    """Events of all layers in one row, named by operation."""
    return place_of(event)


def by_layer(event: Event) -> str:
    """Events apart by their full place in the model and their name."""
    return f"{event.path} {event.name}".strip()


def rows(request: Request, step: Step, *, layers: bool = False, by: Callable[[Event], Any] | None = None) -> list[Row]:
    """What a step did, in order."""
    return rows_of(step.events, request.profile.roof, by=by or (by_layer if layers else by_place))


def main_step(request: Request) -> tuple[Step, str]:
    """The step that the tables show, and what it is."""
    step = request.typical
    if step is None:
        return request.steps[0], "the prompt, up to the first token"
    return step, f"one token of the answer ({step.name}, the median of {len(request.answer) - 1})"


def total(step: Step) -> Any:
    """The step's whole cost, or None where a part of it is not known."""
    costs = [event.cost for event in step.events]
    known = [cost for cost in costs if cost is not None]
    return sum(known[1:], known[0]) if known and len(known) == len(costs) else None


# --- the story -------------------------------------------------------------------------------------------------------


def story(request: Request) -> list[tuple[str, str]]:
    """(step, what happened) from text to text."""
    config, cache = request.llm.config, request.cache
    spans = {span.name: span for span in request.profile.spans}
    told: list[tuple[str, str]] = []

    def took(name: str) -> str:
        return f", {seconds_text(spans[name].seconds)}" if name in spans else ""

    if request.rendered is not None:
        text = f"{len(request.prompt):,} characters become {len(request.rendered):,}"
        told.append(("chat template", text + took("chat template")))
    told.append(("tokenised", f"{len(request.ids):,} ids out of {config.vocab:,}" + took("tokenise")))
    prompt = request.steps[0]
    embedding = [event for event in prompt.events if event.kind == "embedding"]
    if embedding and embedding[0].operands:
        made = ", ".join(embedding[0].results)
        told.append(("embedded", f"rows of {embedding[0].operands[-1]} become {made}"))
    shape = f"{config.layers} layers of {config.dim}, {config.heads} heads on {config.kv_heads}"
    told.append(("prompt", f"{shape}: {step_text(prompt)}"))
    kept = f"{cache.used:,} of {cache.context:,} positions, {quantity(cache.bytes_a_token, 'B')} each ({cache.dtype})"
    told.append(("KV cache", f"{kept}: {quantity(cache.used * cache.bytes_a_token, 'B')}"))
    if (step := request.typical) is not None:
        told.append(("each token", step_text(step)))
    first = request.answer[0] if request.answer else None
    if first is not None:
        rivals = [c for c in first.candidates if c.id != first.id][:2]
        against = ", ".join(f"{shown(c.piece)} {percent(c.probability)}" for c in rivals)
        how = "the likeliest" if request.options.temperature == 0 else f"temperature {request.options.temperature:g}"
        told.append(("sampled", f"{how}: {shown(first.piece)} {percent(first.probability)}, before {against}"))
    told.append(("detokenised", f"{len(request.answer)} tokens become {len(request.text):,} characters"))
    return told


def step_text(step: Step) -> str:
    """Sizes of a step: 154 dispatches, 0.61 ms on the device, 72 MB read, 270 MFLOP."""
    parts = [f"{step.dispatches:,} dispatches", f"{seconds_text(step.seconds)} on the device"]
    if (cost := total(step)) is not None:
        parts += [f"{quantity(cost.read, 'B')} read", quantity(cost.flops, "FLOP")]
    return ", ".join(parts)


def shown(piece: str) -> str:
    """A piece of text in quotes, without anything that would command a terminal."""
    return f'"{piece.translate(CONTROLS | {10: 0x240A, 9: 0x2409})}"'


def facts(request: Request) -> dict[str, Any]:
    """Speed and shares, from the runs that nobody watched closely."""
    timings, loose = request.timings, request.unwatched
    busy = loose.busy_s / loose.seconds if loose.seconds > 0 else 0.0
    step, found = request.typical, {}
    if step is not None and (cost := total(step)) is not None and loose.ceilings is not None:
        spent = timings.answer_seconds / max(timings.answer_tokens - 1, 1)
        share = cost.bytes / loose.ceilings.copy_bytes_per_s / spent if spent > 0 else 0.0
        found = {"bytes_a_token": cost.bytes, "flops_a_token": cost.flops, "bandwidth_share": share}
    gaps = loose.gaps()
    return {
        "prompt_tokens_per_second": timings.prompt_rate,
        "answer_tokens_per_second": timings.answer_rate,
        "device_busy": busy,
        "gaps": len(gaps),
        "gap_seconds": sum(gap.seconds for gap in gaps),
        "host_seconds": loose.host(),
        **found,
    }


# --- terminal --------------------------------------------------------------------------------------------------------


def text(request: Request, *, layers: bool = False) -> str:
    """Everything for a terminal."""
    caps, known = request.llm.device.caps, facts(request)
    step, what = main_step(request)
    lines = [f"{request.model} on {caps.name} | {caps.backend_version} | {caps.driver}", ""]
    told = [(str(i), *row) for i, row in enumerate(story(request), 1)]
    lines += [term.table(told, right=(0,)), ""]
    lines.append(f"prompt   {pieces(request)}")
    lines.append(f"answer   {chosen(request.answer)}")
    lines += ["", f"{what}:", table(rows(request, step, layers=layers), step)]
    lines += ["", "by kind:", table(kinds(request, step), step)]
    lines += ["", *closing(request, known)]
    return "\n".join(lines)


def table(found: Sequence[Row], step: Step) -> str:
    """Rows as text; their shares are of the step's time."""
    cells = [roofline.cells(row, step.seconds) for row in found]
    return term.table(cells, header=roofline.HEADER, right=roofline.RIGHT)


def kinds(request: Request, step: Step) -> list[Row]:
    """A step's rows summed by kind of work, the dearest first."""
    return sorted(rows(request, step, by=lambda event: event.kind), key=lambda row: -row.seconds)


def pieces(request: Request) -> str:
    """Ids and texts of the prompt's first tokens."""
    from apps.trace.request import piece_of

    told = [f"{i} {shown(piece_of(request.llm, i))}" for i in request.ids[:SHOWN]]
    more = len(request.ids) - SHOWN
    return "  ".join(told) + (f"  and {more:,} more" if more > 0 else "")


def chosen(answer: Sequence[Chosen]) -> str:
    """The answer's first tokens with their probabilities."""
    told = [f"{shown(token.piece)} {percent(token.probability)}" for token in answer[:SHOWN]]
    more = len(answer) - SHOWN
    return "  ".join(told) + (f"  and {more:,} more" if more > 0 else "")


def closing(request: Request, known: dict[str, Any]) -> list[str]:
    """Speed, gaps, and how everything was measured."""
    loose, timings = request.unwatched, request.timings
    speed = f"prompt {known['prompt_tokens_per_second']:,.0f} tokens/s"
    if timings.answer_tokens > 1:
        speed += f", answer {known['answer_tokens_per_second']:,.1f} tokens/s"
    if "bandwidth_share" in known:
        moved = quantity(known["bytes_a_token"], "B")
        speed += f"; {moved} a token are {percent(known['bandwidth_share'])} of this device's bandwidth"
    host = ", ".join(f"{name} {microseconds(s)} us" for name, s in known["host_seconds"].items() if s > 0)
    step, note = request.typical, request.profile.note
    if step is not None and (whole := request.whole_seconds(step)) is not None:
        note += f": {seconds_text(step.seconds)} for {step.name}, and {seconds_text(whole)} when nothing is between"
    lines = [
        f"unwatched: {speed}",
        f"device: busy {percent(known['device_busy'])} of {seconds_text(loose.seconds)}; {known['gaps']} gaps between "
        f"submits, {microseconds(known['gap_seconds'])} us",
        f"host: {host}",
        f"times: {note}",
    ]
    if loose.ceilings is not None:
        lines.append(f"roofline: {roofline.ceiling_text(loose.ceilings)}")
    return lines


# --- machines --------------------------------------------------------------------------------------------------------


def as_json(request: Request) -> dict[str, Any]:
    """One object with everything: sizes in bytes, times in seconds."""
    from apps.trace.request import piece_of

    caps, profile = request.llm.device.caps, request.profile
    step, what = main_step(request)
    return {
        "model": request.model,
        "device": caps.name,
        "driver": caps.driver,
        "backend": caps.backend_version,
        "prompt": {
            "text": request.prompt,
            "rendered": request.rendered,
            "ids": request.ids,
            "pieces": [piece_of(request.llm, i) for i in request.ids],
        },
        "answer": {
            "text": request.text,
            "finish_reason": request.finish,
            "tokens": [token_json(token) for token in request.answer],
        },
        "kv_cache": {
            "dtype": request.cache.dtype,
            "bytes_a_token": request.cache.bytes_a_token,
            "positions_used": request.cache.used,
            "positions": request.cache.context,
            "bytes_used": request.cache.used * request.cache.bytes_a_token,
            "bytes": request.cache.context * request.cache.bytes_a_token,
        },
        "story": [list(row) for row in story(request)],
        "unwatched": facts(request),
        "steps": [
            {
                "name": s.name,
                "dispatches": s.dispatches,
                "device_seconds": s.seconds,
                "unwatched_device_seconds": request.whole_seconds(s),
                "cost": cost_json(total(s)),
            }
            for s in request.steps
        ],
        "shown": what,
        "rows": [row_json(row) for row in rows(request, step, layers=True)],
        "kinds": [row_json(row) for row in kinds(request, step)],
        "times": profile.note,
        "overhead_seconds": profile.overhead_s,
        "ceilings": None if profile.ceilings is None else profile.ceilings.as_dict(),
    }


def token_json(token: Chosen) -> dict[str, Any]:
    """A token as --json has it."""
    candidates = [{"id": c.id, "piece": c.piece, "probability": c.probability} for c in token.candidates]
    return {"id": token.id, "piece": token.piece, "probability": token.probability, "candidates": candidates}


def row_json(row: Row) -> dict[str, Any]:
    """A row as --json has it; times in seconds, amounts in bytes and operations."""
    return {
        "name": row.name,
        "kind": row.kind,
        "dispatches": row.count,
        "device_seconds": row.seconds,
        "cost": cost_json(row.cost),
        "roofline": row.share,
        "bound": row.bound,
        "kernels": list(row.kernels),
        "operands": list(row.operands),
        "results": list(row.results),
    }


def cost_json(cost: Any) -> dict[str, float] | None:
    """A Cost as --json has it."""
    return None if cost is None else {"flops": cost.flops, "read": cost.read, "written": cost.written}


def write_chrome(request: Request, path: Path) -> None:
    """The profile as a trace for ui.perfetto.dev, with what the request was."""
    known = {"model": request.model, "prompt": request.prompt, "answer": request.text, "speed": facts(request)}
    chrome.write(request.profile, path, title=request.model, facts=known)


def page(request: Request, *, layers: bool = False) -> str:
    """The page."""
    from apps.trace.request import piece_of

    caps, known, llm = request.llm.device.caps, facts(request), request.llm
    step, what = main_step(request)
    made = Page(
        f"{request.model}: one request, from text to text",
        subtitle=f"{caps.name}, {caps.driver}, {caps.backend_version}",
    )
    if request.timings.answer_tokens > 1:
        made.tile(f"{known['answer_tokens_per_second']:,.1f}", "answer tokens a second", "the run that nobody watched")
        made.tile(seconds_text(1 / known["answer_tokens_per_second"]), "a token, on the clock")
    made.tile(f"{known['prompt_tokens_per_second']:,.0f}", "prompt tokens a second")
    made.tile(f"{step.dispatches:,}", "dispatches a token" if request.typical else "dispatches")
    if "bytes_a_token" in known:
        made.tile(quantity(known["bytes_a_token"], "B"), "moved a token")
        made.tile(percent(known["bandwidth_share"]), "of the memory's bandwidth")
    made.tile(percent(known["device_busy"]), "of the time the device is busy")
    made.data["quote"] = [request.prompt, request.text.strip()]
    made.data["story"] = [list(row) for row in story(request)]
    made.data["prompt"] = [[i, piece_of(llm, i), llm.tokenizer.is_control(i)] for i in request.ids]
    made.data["answer"] = [
        {
            "id": token.id,
            "piece": token.piece,
            "special": token.special,
            "p": token.probability,
            "top": [[c.piece, c.probability] for c in token.candidates],
        }
        for token in request.answer
    ]
    if request.typical is not None:
        made.view("one token", step.start, step.end)
    made.view("prompt", request.steps[0].start, request.steps[0].end)
    for line in closing(request, known)[:3]:
        made.note(line)
    title = f"Kernels of {what}" if layers else f"Kernels of {what}, layers together"
    return made.profile(
        request.profile, events=step.events, by=by_layer if layers else by_place, rows_title=title
    ).html()

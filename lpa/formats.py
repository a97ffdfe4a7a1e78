"""A transcript as text, subtitles or JSON. Knows no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from .align import Word

CUE_SECONDS = 6.0  # a subtitle stays no longer than this,
CUE_LETTERS = 84  # is no longer than two lines of 42,
PAUSE_SECONDS = 1.0  # and ends where the speaker does


@dataclass(frozen=True)
class Transcript:
    """What was said in a recording, and when."""

    text: str
    words: tuple[Word, ...]
    seconds: float  # how long the recording is


def to_txt(transcript: Transcript, name: str = "") -> str:
    return transcript.text + "\n"


def to_json(transcript: Transcript, name: str = "") -> str:
    """One line: file, text, seconds, words."""
    words = [{**asdict(w), "confidence": round(w.confidence, 4)} for w in transcript.words]
    for word in words:
        word |= {"start": round(word["start"], 3), "end": round(word["end"], 3)}
    data = {"file": name, "text": transcript.text, "seconds": round(transcript.seconds, 3), "words": words}
    return json.dumps(data, ensure_ascii=False) + "\n"


def to_srt(transcript: Transcript, name: str = "") -> str:
    blocks = [
        f"{number}\n{clock(cue[0].start, ',')} --> {clock(cue[-1].end, ',')}\n{lines(cue)}\n"
        for number, cue in enumerate(cues(transcript.words), 1)
    ]
    return "\n".join(blocks)


def to_vtt(transcript: Transcript, name: str = "") -> str:
    blocks = [
        f"{clock(cue[0].start, '.')} --> {clock(cue[-1].end, '.')}\n{lines(cue, escape=True)}\n"
        for cue in cues(transcript.words)
    ]
    return "\n".join(["WEBVTT\n", *blocks])


FORMATS: dict[str, Callable[[Transcript, str], str]] = {
    "json": to_json,
    "srt": to_srt,
    "txt": to_txt,
    "vtt": to_vtt,
}


def cues(words: Sequence[Word]) -> Iterator[list[Word]]:
    """Words in groups that are one subtitle each."""
    cue: list[Word] = []
    for word in words:
        if cue:
            letters = sum(len(w.word) + 1 for w in cue) + len(word.word)
            long = word.end - cue[0].start > CUE_SECONDS or letters > CUE_LETTERS
            if long or word.start - cue[-1].end > PAUSE_SECONDS:
                yield cue
                cue = []
        cue.append(word)
    if cue:
        yield cue


def lines(cue: Sequence[Word], escape: bool = False) -> str:
    """The text of a subtitle in at most two lines of like length. `escape`: for WebVTT, where < and & mean more."""
    words = [w.word for w in cue]
    if escape:
        words = [w.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") for w in words]
    if len(" ".join(words)) <= CUE_LETTERS // 2:
        return " ".join(words)
    cut = min(range(len(words) + 1), key=lambda i: abs(len(" ".join(words[:i])) - len(" ".join(words[i:]))))
    return "\n".join(filter(None, (" ".join(words[:cut]), " ".join(words[cut:]))))


def clock(seconds: float, mark: str) -> str:
    """00:00:01,500: hours, minutes, seconds and, after the mark, milliseconds."""
    ms = round(seconds * 1000)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{mark}{ms % 1000:03}"

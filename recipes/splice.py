"""New utterances out of real ones: phrases of one speaker, cut where it is quiet between words and joined anew.

    python recipes/splice.py --model DIR --data DIR --out DIR --hours H [--held-out A,B,…]

A few hours of transcripts are soon known by heart. In another order their voices go on teaching. --model, a CTC model
that has been trained on the same speech, says where the words are; what it does not read as it is written is left
out. --out gets packed shards as `lpa train` reads them.
"""

from __future__ import annotations

import argparse
import sys
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from lpa import align, families
from lpa.audio import RATE
from lpa.data import AudioBank, bucket
from lpa.sources import open_sources, write_npz

SIZE = 200  # utterances a shard
FADE = RATE // 100  # samples
Phrase = tuple[np.ndarray, str]  # samples, text
WORDS, SECONDS = (1, 6), (5.0, 15.0)  # of a phrase, of an utterance


def phrases(clip: np.ndarray, words: tuple[align.Word, ...], text: str, rng: np.random.Generator) -> list[Phrase]:
    """What the model reads as it is written, cut at the quietest 20 ms of the gap between two words."""
    total = np.cumsum(np.pad(clip.astype(np.float64) ** 2, RATE // 100))
    power = total[RATE // 50 :] - total[: -(RATE // 50)]  # (S,) of the 20 ms around each sample
    cuts = [0]
    for one, two in pairwise(words):
        gap = slice(int(one.end * RATE), max(int(two.start * RATE), int(one.end * RATE) + 1))
        cuts.append(gap.start + int(power[gap].argmin()))
    cuts.append(len(clip))
    found = []
    for first, _, count in SequenceMatcher(None, [w.word for w in words], text.split()).get_matching_blocks():
        end = first + count
        while first < end:
            last = min(end, first + int(rng.integers(WORDS[0], WORDS[1] + 1)))
            found.append((clip[cuts[first] : cuts[last]], " ".join(w.word for w in words[first:last])))
            first = last
    return found


def joined(pieces: list[np.ndarray]) -> np.ndarray:
    """One after the other, each faded into the next."""
    rise = np.linspace(0, 1, FADE)
    whole = pieces[0].astype(np.float64)
    for piece in pieces[1:]:
        whole[-FADE:] = whole[-FADE:] * (1 - rise) + piece[:FADE] * rise
        whole = np.concatenate([whole, piece[FADE:]])
    return np.rint(whole).astype(np.int16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "data", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--hours", type=float, default=20.0)
    parser.add_argument("--held-out", default="")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=int, help="utterances to cut (all)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    model = families.load(str(options.model)).to(options.device).eval()
    held_out = [name for name in options.held_out.split(",") if name]
    bank = AudioBank(open_sources([str(options.data)], exclude=held_out))

    by_speaker: dict[str, list[Phrase]] = {}
    for batch in bucket(bank.lengths[: options.limit], 300 * RATE, rng):
        audio, lengths = (torch.from_numpy(a).to(options.device) for a in bank.gather(batch))
        with torch.inference_mode():
            out = model(audio, lengths)
        for index, logits, frames in zip(batch, out.logits.float().cpu().numpy(), out.lengths.tolist(), strict=True):
            words = align.words(logits[:frames], model.tokens, model.frame_rate)
            found = phrases(bank.clip(index), words, bank.texts[index], rng)
            by_speaker.setdefault(bank.speakers[index], []).extend(found)
    print(f"{sum(map(len, by_speaker.values()))} phrases", file=sys.stderr)

    options.out.mkdir(parents=True, exist_ok=True)
    pools = {speaker: [p for p in found if len(p[0]) > 2 * FADE] for speaker, found in by_speaker.items()}
    shares = np.array([len(pool) for pool in pools.values()], float)
    made, number = 0.0, 0
    while made < options.hours * 3600:
        clips, texts, speakers = [], [], []
        for speaker in rng.choice(list(pools), SIZE, p=shares / shares.sum()):
            wanted, chosen = rng.uniform(*SECONDS) * RATE, []
            while sum(len(piece) for piece, _ in chosen) < wanted:
                chosen.append(pools[speaker][rng.integers(len(pools[speaker]))])
            clips.append(joined([piece for piece, _ in chosen]))
            texts.append(" ".join(text for _, text in chosen))
            speakers.append(speaker)
        lengths = np.array([len(clip) for clip in clips])
        shard = {"audio": np.concatenate(clips), "lengths": lengths, "text": np.array(texts), "speaker": speakers}
        write_npz(options.out / f"{number:05d}.npz", **shard)
        made, number = made + lengths.sum() / RATE, number + 1
    print(f"{made / 3600:.1f} h in {number} shards", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

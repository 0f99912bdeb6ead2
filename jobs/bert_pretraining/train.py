"""Pre-train BERT by masked language modelling, with the same steps on processors, GPUs and Trainium (`--device`).

A part of every text is hidden, and the model is to say what stood there: 15 % of the tokens are chosen; of these 80 %
become [MASK], 10 % another token, and 10 % stay as they are (Devlin et al. 2019, section 3.1). Every sequence has the
same number of chosen tokens. So the mean over ranks is the mean over the batch, and with `--dropout 0` any number of
ranks takes the same steps, up to rounding.

A step's batch is `--batch-size` sequences × `--grad-accumulation` × the number of ranks. Which ones they are, and what
is hidden, follows from the number of the step: a run that goes on from a checkpoint takes the steps that it would have
taken. With two ranks they are the same bit by bit; with more, DDP may add gradients in another order.

Without `--corpus` the text is that of Python's own manual (`help("topics")`). For a larger one:

    python train.py --prepare /data/corpus --text /data/text        # once, by one process; writes tokens.npy
    torchrun ... train.py --corpus /data/corpus
"""

import argparse
import importlib.util
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
import torch.distributed as dist

# What mnist_torch_ddp says of this import holds here too: later, it would keep the group's threads alive.
import torch.distributed.nn
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForMaskedLM

from workshop_utils import place
from workshop_utils.training import checkpoints

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CLS, SEP, MASK = 2, 3, 4
CHOSEN, MASKED, REPLACED = 0.15, 0.8, 0.1
NOT_ASKED = -100  # the label of a token that does not count in the loss


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda", "neuron"],
        default="auto",
        help="auto: a GPU if there is one",
    )
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="of matrix products"
    )
    parser.add_argument(
        "--steps", type=int, default=60, help="of the whole training; the learning rate ends there"
    )
    parser.add_argument(
        "--steps-this-run", type=int, default=0, help="stop after so many; 0: not before the end"
    )
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of one worker in a forward pass")
    parser.add_argument(
        "--grad-accumulation", type=int, default=1, help="forward passes before an all-reduce"
    )
    parser.add_argument("--sequence", type=int, default=64, help="tokens, with [CLS] and [SEP]")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--warmup-steps", type=int, default=10)
    parser.add_argument(
        "--clip-norm", type=float, default=1.0, help="of all gradients together; 0: do not clip"
    )
    parser.add_argument("--checkpoint-steps", type=int, default=0, help="0: save none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus", type=Path, help="a folder that --prepare has written")
    parser.add_argument("--prepare", type=Path, help="write the corpus into this folder, and train nothing")
    parser.add_argument("--text", type=Path, help="with --prepare: a folder of .txt files in UTF-8")
    parser.add_argument(
        "--vocabulary", type=int, default=2048, help="without --corpus: tokens of the vocabulary"
    )
    given = parser.parse_args()
    least = {"steps": 1, "steps_this_run": 0, "batch_size": 1, "grad_accumulation": 1, "sequence": 8, "layers": 1,
             "hidden": 1, "heads": 1, "warmup_steps": 0, "clip_norm": 0, "checkpoint_steps": 0,
             "vocabulary": 300}  # fmt: skip
    for name, smallest in least.items():
        if getattr(given, name) < smallest:
            parser.error(
                f"{name.replace('_', '-')} is {getattr(given, name)}; it must be at least {smallest}"
            )
    if given.hidden % given.heads:
        parser.error(f"hidden is {given.hidden}; heads, {given.heads}, must divide it")
    return given


def chosen_device(name: str, here: place.Place) -> str:
    """What this process trains on; ends the run, with a sentence, where it does not have it."""
    if name == "neuron" and not importlib.util.find_spec("torch_neuronx"):
        sys.exit(
            "device is 'neuron', and torch_neuronx is not installed: it is in the image of "
            "jobs/images/neuron.Dockerfile, for machines with Trainium. Use --device cpu here"
        )
    if name in ("cpu", "neuron"):
        return name
    device = here.device
    if name == "cuda" and device == "cpu":
        sys.exit(
            "device is 'cuda', and PyTorch finds no GPU here: use --device cpu, or a job with resources.gpu: 1"
        )
    return device


def join(name: str, here: place.Place) -> tuple[torch.device, Callable[[], None]]:
    """Meet the other ranks; the device of this one, and what to call where a graph of operations ends."""
    if name.startswith("cuda"):
        device = torch.device(name)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", rank=here.rank or 0, world_size=here.world_size, device_id=device)
        return device, lambda: None
    # Trainium 1: PyTorch/XLA, up to PyTorch 2.9
    if name == "neuron" and importlib.util.find_spec("torch_xla"):
        import torch_xla.core.xla_model as xla
        import torch_xla.distributed.xla_backend  # noqa: F401  registers the backend

        dist.init_process_group("xla")
        return xla.xla_device(), xla.mark_step  # operations only run, as one graph, once it is called
    if name == "neuron":  # Trainium 2 and 3: a device like any other
        import torch_neuronx  # noqa: F401  registers device and backend

        dist.init_process_group("neuron")
        return torch.device("neuron"), lambda: None
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=here.rank or 0, world_size=here.world_size)
    return torch.device("cpu"), lambda: None


def tokens_of(texts: list[str], vocabulary: int) -> np.ndarray:
    """All tokens of `texts`, one after the other, as whole numbers below `vocabulary`.

    Pieces of words by byte-pair encoding. BERT's own WordPiece would do as well, but the library's trainer for it gives
    another vocabulary each time, and all ranks, and a restarted run, must agree on theirs.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return np.concatenate([np.array(one.ids, dtype=np.int32) for one in encoded])


def prepare(folder: Path, text: Path | None, vocabulary: int) -> None:
    """Write `tokens.npy` and `corpus.json` into `folder`."""
    files = sorted(text.rglob("*.txt")) if text else []
    if text and not files:
        sys.exit(f"text is {text}; there is no .txt file in it")
    texts = [file.read_text(encoding="utf-8") for file in files] or manual()
    tokens = tokens_of(texts, vocabulary)
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "tokens.npy", tokens)
    (folder / "corpus.json").write_text(json.dumps({"vocabulary": vocabulary}), encoding="utf-8")
    print(f"{len(texts)} texts, {len(tokens):,} tokens in {folder}")


def manual() -> list[str]:
    return [topics[name] for name in sorted(topics)]


def load(given: argparse.Namespace) -> tuple[np.ndarray, int]:
    """The text as rows of `sequence - 2` tokens, and the size of the vocabulary."""
    if given.corpus is None:
        tokens, vocabulary = tokens_of(manual(), given.vocabulary), given.vocabulary
    else:
        missing = [name for name in ("tokens.npy", "corpus.json") if not (given.corpus / name).is_file()]
        if missing:
            sys.exit(f"corpus is {given.corpus}; there is no {missing[0]} in it: write it with --prepare")
        tokens = np.load(given.corpus / "tokens.npy", mmap_mode="r")  # every rank reads what it needs of it
        vocabulary = json.loads((given.corpus / "corpus.json").read_text(encoding="utf-8"))["vocabulary"]
    length = given.sequence - 2
    if len(tokens) < length:
        sys.exit(f"the corpus holds {len(tokens)} tokens; one sequence needs {length}")
    return tokens[: len(tokens) // length * length].reshape(-1, length), vocabulary


def masked(row: np.ndarray, vocabulary: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A sequence as the model sees it, and its labels: what stood where a token was chosen. Shapes (sequence,)."""
    tokens = np.concatenate([[CLS], row, [SEP]]).astype(np.int64)
    labels = np.full_like(tokens, NOT_ASKED)
    chosen = 1 + random.choice(len(row), max(1, round(CHOSEN * len(row))), replace=False)
    labels[chosen] = tokens[chosen]
    luck = random.random(len(chosen))
    others = random.integers(len(SPECIAL), vocabulary, len(chosen))
    tokens[chosen] = np.where(luck < MASKED, MASK, np.where(luck < MASKED + REPLACED, others, tokens[chosen]))
    return tokens, labels


def micro_batches(
    rows: np.ndarray, vocabulary: int, step: int, given: argparse.Namespace
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels of each forward pass of this rank in a step, shapes (batch_size, sequence)."""
    own = given.batch_size * given.grad_accumulation
    first = dist.get_rank() * own
    drawn = np.random.default_rng((given.seed, step)).integers(len(rows), size=own * dist.get_world_size())
    for start in range(first, first + own, given.batch_size):
        pairs = [
            masked(rows[drawn[index]], vocabulary, np.random.default_rng((given.seed, step, index)))
            for index in range(start, start + given.batch_size)
        ]
        tokens, labels = (torch.from_numpy(np.stack(column)) for column in zip(*pairs, strict=True))
        yield tokens, labels


class Training:
    """The model, its optimizer and `step`, how many steps were made: all that a checkpoint holds.

    `corpus` is a number that another corpus would not have.
    """

    def __init__(self, vocabulary: int, corpus: int, device: torch.device, given: argparse.Namespace) -> None:
        torch.manual_seed(given.seed)
        config = BertConfig(
            vocab_size=vocabulary, hidden_size=given.hidden, num_hidden_layers=given.layers,
            num_attention_heads=given.heads, intermediate_size=4 * given.hidden,
            max_position_embeddings=given.sequence, hidden_dropout_prob=given.dropout,
            attention_probs_dropout_prob=given.dropout, pad_token_id=0,
            attn_implementation="eager",  # the same arithmetic on every device
        )  # fmt: skip
        self.model: nn.Module = BertForMaskedLM(config).to(device)
        self.named = dict(self.model.named_parameters())
        # The learning rate is a tensor: as a number it would be a constant of XLA's graph, compiled anew at every step.
        self.learning_rate = torch.tensor(0.0, device=device)
        self.graph = (
            device.type != "cpu"
        )  # on a GPU, too, the rate stays where it is, and nothing waits for it
        self.optimizer = torch.optim.AdamW(
            self.named.values(),
            lr=self.learning_rate,
            weight_decay=0.01,
            foreach=False,
            capturable=self.graph,
        )
        self.vocabulary, self.device, self.step = vocabulary, device, 0
        # What makes another run of it: a checkpoint with other ones is not this run's.
        # Any number of ranks may go on, as long as a step has as many sequences.
        names = ("seed", "steps", "sequence", "layers", "hidden", "heads", "dropout", "learning_rate", "warmup_steps",
                 "clip_norm", "dtype")  # fmt: skip
        batch = given.batch_size * given.grad_accumulation * dist.get_world_size()
        own = {name.replace("_", "-"): getattr(given, name) for name in names}
        self.settings = {**own, "vocabulary": vocabulary, "corpus": corpus, "sequences of a step": batch}

    def set_learning_rate(self, given: argparse.Namespace) -> None:
        """Up in a straight line while warming up, then down to 0 at the last step (Devlin et al. 2019, A.2)."""
        up = (self.step + 1) / given.warmup_steps if given.warmup_steps else 1.0
        down = (given.steps - self.step) / max(1, given.steps - given.warmup_steps)
        self.learning_rate.fill_(given.learning_rate * min(up, down, 1.0))

    def save(self, folder: Path) -> None:
        arrays = {}
        for name, parameter in self.named.items():
            state = self.optimizer.state[parameter]
            for part in ("exp_avg", "exp_avg_sq"):
                arrays[f"{part}/{name}"] = state[part].cpu().numpy()
            arrays[f"weight/{name}"] = parameter.detach().cpu().numpy()
        checkpoints.save(folder, self.step, arrays, self.settings)

    def resume(self, folder: Path) -> None:
        """Go on from the newest whole checkpoint, if there is one: rank 0 reads it, and tells the others."""
        try:
            found = checkpoints.newest(folder, self.settings) if dist.get_rank() == 0 else None
        except (OSError, checkpoints.OtherRun) as error:
            sys.exit(f"cannot resume: {error}")
        arrays = found.arrays if found else {}
        step = torch.tensor(found.step if found else 0, device=self.device)
        dist.broadcast(step, src=0)
        self.step = int(step)
        if not self.step:
            return
        for name, parameter in self.named.items():
            moments = {part: torch.zeros_like(parameter) for part in ("exp_avg", "exp_avg_sq")}
            for part, tensor in (("weight", parameter.data), *moments.items()):
                if found:
                    tensor.copy_(torch.from_numpy(arrays[f"{part}/{name}"]))
                dist.broadcast(tensor, src=0)
            counted = torch.tensor(float(self.step), device=self.device if self.graph else "cpu")
            self.optimizer.state[parameter] = {"step": counted, **moments}
        if dist.get_rank() == 0:
            print(f"resumed after step {self.step}")


def train(
    training: Training,
    rows: np.ndarray,
    mark: Callable[[], None],
    given: argparse.Namespace,
    folder: Path | None,
) -> None:
    """Take the steps and report them; the rate of samples is that of all steps after the first, which compiles."""
    parallel = DistributedDataParallel(training.model, gradient_as_bucket_view=True)
    last = given.steps if not given.steps_this_run else min(given.steps, training.step + given.steps_this_run)
    size, begun, samples, seconds = dist.get_world_size(), training.step, 0, 0.0
    while training.step < last:
        started = time.perf_counter()
        training.set_learning_rate(given)
        training.optimizer.zero_grad()
        torch.manual_seed((given.seed * 1_000_003 + training.step) * size + dist.get_rank())  # of dropout
        total = torch.zeros((), device=training.device)
        batches = list(micro_batches(rows, training.vocabulary, training.step, given))
        for number, (tokens, labels) in enumerate(batches, start=1):
            # Gradients add up on their rank; only those of the last forward pass start the all-reduce.
            with nullcontext() if number == len(batches) else parallel.no_sync():
                with torch.autocast(training.device.type, torch.bfloat16, enabled=given.dtype == "bfloat16"):
                    found = parallel(input_ids=tokens.to(training.device), labels=labels.to(training.device))
                loss = found.loss / len(batches)
                loss.backward()
            total += loss.detach()
            mark()  # a graph has one forward pass, whatever the accumulation is, so the compiler gets it done
        if given.clip_norm:
            nn.utils.clip_grad_norm_(training.model.parameters(), given.clip_norm)
        training.optimizer.step()
        mark()
        training.step += 1
        values = {"loss": total.item()}  # waits for the device
        if training.step == begun + 1:
            place.report(step=training.step, device=str(training.learning_rate.device), **values)
        else:
            samples, seconds = (
                samples + given.batch_size * len(batches),
                seconds + time.perf_counter() - started,
            )
            place.report(step=training.step, samples_per_second=samples / seconds, **values)
        ends = training.step == last and training.step < given.steps
        if folder and (ends or (given.checkpoint_steps and training.step % given.checkpoint_steps == 0)):
            if dist.get_rank() == 0:
                training.save(folder)
            dist.barrier()  # nobody leaves before it is written


def main() -> None:
    given = options()
    if given.prepare:
        prepare(given.prepare, given.text, given.vocabulary)
        return
    here = place.here()
    device, mark = join(chosen_device(given.device, here), here)
    if dist.get_world_size() != here.world_size:
        sys.exit(
            f"{here.world_size} workers were started, but the group of {given.device} has {dist.get_world_size()}"
        )
    rows, vocabulary = load(given)
    training = Training(vocabulary, zlib.crc32(rows[:1000].tobytes()), device, given)
    folder = place.checkpoint_folder()
    if folder:
        training.resume(folder)
    train(training, rows, mark, given, folder)
    if dist.get_rank() == 0 and training.step == given.steps:
        here.model_folder.mkdir(parents=True, exist_ok=True)
        torch.save(
            {name: tensor.detach().cpu() for name, tensor in training.named.items()},
            here.model_folder / "model.pt",
        )
    # Who holds the group must let go of it first, and all must have met: see mnist_torch_ddp.
    dist.barrier()
    del training
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

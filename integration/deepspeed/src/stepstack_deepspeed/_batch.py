"""Batch sizes: three numbers, of which any one, and often two, follow from the others."""

from dataclasses import dataclass

from stepstack_deepspeed._section import Section


@dataclass(frozen=True)
class Batch:
    """How many samples a step of the optimizer sees: `train == micro * accumulation * ranks`."""

    train: int
    """All of them."""
    micro: int
    """Of one backward of one rank."""
    accumulation: int
    """Backwards in a step."""
    ranks: int

    @classmethod
    def read(cls, config: Section, ranks: int) -> "Batch":
        """From what a config says of the three; ValueError where nothing follows, or something else does.

        Without `gradient_accumulation_steps` it is whatever makes the other two agree, and 1 if only one of them is
        there.
        """
        train = config.whole("train_batch_size", None)
        micro = config.whole("train_micro_batch_size_per_gpu", None)
        accumulation = config.whole("gradient_accumulation_steps", None)
        if train is None and micro is None:
            raise ValueError(
                "the config needs train_batch_size or train_micro_batch_size_per_gpu, of which the other follows: "
                f"train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * {ranks} "
                f"{'rank' if ranks == 1 else 'ranks'}"
            )
        if train is None:
            assert micro is not None
            accumulation = accumulation or 1
            return cls(micro * accumulation * ranks, micro, accumulation, ranks)
        if micro is None:
            accumulation = accumulation or 1
            micro = _quotient(train, "train_micro_batch_size_per_gpu", ranks, accumulation=accumulation)
        elif accumulation is None:
            accumulation = _quotient(train, "gradient_accumulation_steps", ranks, micro=micro)
        if train != micro * accumulation * ranks:
            raise ValueError(
                f"train_batch_size is {train}, but train_micro_batch_size_per_gpu * gradient_accumulation_steps * "
                f"ranks is {micro} * {accumulation} * {ranks} = {micro * accumulation * ranks}: correct one of them, "
                "or leave one out to have it follow"
            )
        return cls(train, micro, accumulation, ranks)


def _quotient(train: int, wanted: str, ranks: int, **given: int) -> int:
    (name, number), *_ = given.items()
    quotient, rest = divmod(train, number * ranks)
    if rest or not quotient:
        long_name = {"micro": "train_micro_batch_size_per_gpu", "accumulation": "gradient_accumulation_steps"}[name]
        raise ValueError(
            f"{wanted} can't follow: train_batch_size {train} is not a multiple of {long_name} * ranks, "
            f"{number} * {ranks} = {number * ranks}"
        )
    return quotient

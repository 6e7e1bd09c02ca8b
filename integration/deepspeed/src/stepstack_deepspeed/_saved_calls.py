"""What an engine writes and reads: checkpoints, and weights."""

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from stepstack_deepspeed import _engine_checkpoint
from stepstack_deepspeed._weights import load_, save_, state_dict_of, whole_on_first

if TYPE_CHECKING:
    from stepstack_deepspeed._config import Config
    from stepstack_deepspeed._engine import Engine


class SavedCalls:
    """The part of `Engine` that has to do with files and state dicts."""

    module: nn.Module
    _config: "Config"
    _backwards: int

    def save_checkpoint(
        self,
        save_dir: str | PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """Write everything into `save_dir/tag`, complete or not at all; return the checkpoint's path.

        Every rank calls this and writes its share; RuntimeError in the middle of an accumulation. `tag` is
        `global_step{n}` unless given, and that of the first rank; where ranks differ, the config's
        `checkpoint.tag_validation` says whether that is a ValueError, a warning or nothing. `client_state` consists of
        numbers, text, lists, dicts and the like (see `stepstack.save_checkpoint`). `save_latest` writes the tag into
        `save_dir/latest`, when all is complete. `exclude_frozen_parameters` leaves out what is not trained.
        """
        if self._backwards:
            raise RuntimeError(
                f"save_checkpoint() with the gradients of {self._backwards} backwards, which it would lose: "
                "save after the step, or call zero_grad()"
            )
        return _engine_checkpoint.save(
            self._engine, save_dir, tag, client_state or {}, save_latest, exclude_frozen=exclude_frozen_parameters
        )

    def load_checkpoint(
        self,
        load_dir: str | PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[Path | None, Any]:
        """Make everything what it was, on any number of ranks and in any stage; return the path and the client state.

        Every rank calls this. Without a tag it is the one in `load_dir/latest`; (None, None), and a log message, if
        there is none. What isn't loaded stays as it is: counts go with all but `load_module_only`, and frozen
        parameters, which a checkpoint may lack, are left alone with `load_module_strict=False`. Gradients are
        forgotten.
        `stepstack.CheckpointError`, on every rank, for what is incomplete or doesn't fit; then nothing has changed.
        """
        return _engine_checkpoint.load(
            self._engine,
            load_dir,
            tag,
            strict=load_module_strict,
            optimizer_states=load_optimizer_states,
            lr_scheduler_states=load_lr_scheduler_states,
            module_only=load_module_only,
        )

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The module's state dict; in stage 3 of DTensors."""
        return state_dict_of(self.module, exclude_frozen=exclude_frozen_parameters)

    def load_module_state_dict(self, checkpoint: dict[str, Any], strict: bool = True) -> None:
        """Take the weights in `checkpoint["module"]`, whole tensors. Every rank calls this with the same."""
        load_(self.module, checkpoint["module"], strict=strict)

    def save_16bit_model(
        self,
        save_dir: str | PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the weights as `torch.load` reads them, whole and in the dtype that they have in forward; give True.

        Every rank calls this, and the first one writes. `stepstack.CheckpointError` on all if that fails.
        """
        _engine_checkpoint.checked_folder(save_dir, "save_dir")
        state = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        save_(state, Path(save_dir), save_filename)
        return True

    save_fp16_model = save_16bit_model

    @property
    def _engine(self) -> "Engine":
        return cast("Engine", self)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """What `save_16bit_model` writes, on the first rank; trainers call it by this name."""
        state = self.module_state_dict(exclude_frozen_parameters)
        params = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        return whole_on_first(state, params, self._config.precision.dtype)

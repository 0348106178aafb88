"""`zerokl merge`: an adapter and its base become a whole model, with the bits that a run computes with."""

from pathlib import Path

from ...model.adapters import AdapterLayout, adapted_layout, merge_all
from ...model.checkpoint import DTYPES, read_weights, resolve_model
from ...model.checkpoint_writing import write_checkpoint
from ...model.config import ModelConfig
from ...model.peft import read_adapter, read_adapter_config, stored_lora
from ...verify.compare_runs import open_run
from ...verify.ledger import LEDGER
from .ledger_head import other_frozen_weight


def merge_adapter(folder: Path, target: Path, base: str = "", dtype: str = "float32") -> Path:
    """Write the model `target`, a Hugging Face checkpoint in `dtype`. Returns the folder of the base.

    folder: of PEFT, or a checkpoint of a run with LoRA. base: the model that the adapter belongs to; empty is
    the one that the adapter names.

    Raises ValueError for an adapter that is no plain LoRA, for one of another model, and where the adapter
    lies in a run that had another base. Raises OSError where `target` exists or cannot be written.
    """
    base = base or read_adapter_config(folder).base
    if not base:
        raise ValueError(f"merge: {folder} does not name its base; add --base MODEL")
    model = resolve_model(base)
    config, lora = ModelConfig.from_file(model), stored_lora(folder)
    layout = AdapterLayout(adapted_layout(config, lora), lora)
    adapters, weights = read_adapter(folder, layout), read_weights(model, layout.model)
    run = folder.absolute().parent.parent
    if (run / LEDGER).is_file() and folder.parent.name == "checkpoints":
        views = layout.model.checkpoint_views(weights)
        if name := other_frozen_weight(views.items(), open_run(run).head):
            raise ValueError(f"merge: {name} of {model} is not the one that {run} was trained on")
    merged = weights.to(DTYPES[dtype], copy=True)
    merge_all(layout, adapters, weights, merged)
    write_checkpoint(target, layout.model, merged, model)
    return model

"""Token embedding.

    x_t = w[id_t]          dw[v] = sum over t with id_t = v of dx_t

ids [T] int64, w [V, D], x [T, D]. No rounding forward; dw is summed in fp32, token after token in canonical
order.
"""

import torch

from .backend import on_triton
from .grad import grad_buffer, returned_grad


def embedding_ref(ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Forward only."""
    return w.index_select(0, ids)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, w):
        ctx.save_for_backward(ids)
        ctx.w = w
        return embedding_ref(ids, w)

    @staticmethod
    def backward(ctx, dx):
        (ids,) = ctx.saved_tensors
        acc = grad_buffer(ctx.w)
        if on_triton(dx):
            from .embedding_triton import embedding_bwd

            embedding_bwd(acc, ids, dx)
        else:
            acc.index_add_(0, ids, dx.to(acc.dtype))  # on a CPU index_add_ walks the rows one after another
        return None, returned_grad(ctx.w, acc)


def check_ids(ids: torch.Tensor, V: int) -> None:
    """Raise ValueError for an id outside 0..V-1.

    ids on a GPU pass: reading them back would make the host wait for it.
    """
    if ids.device.type == "cpu" and ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < V):
        raise ValueError(
            f"embedding: ids must lie in 0..{V - 1}, got {int(ids.min())}..{int(ids.max())}; "
            "the tokenizer does not fit the model's vocabulary"
        )


def embedding(ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Rows of w. ids [T] int64, w [V, D] -> [T, D]. Raises ValueError for an id outside 0..V-1.

    Ids on a GPU are checked where the host made them (check_ids, as Decoder.hidden does); a wrong one that
    was made there ends in a device-side assertion of torch's index_select.
    """
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise ValueError(
            f"embedding: ids must be a one-dimensional int64 tensor, got {ids.dtype} {tuple(ids.shape)}"
        )
    check_ids(ids, w.shape[0])
    return _Embedding.apply(ids, w)

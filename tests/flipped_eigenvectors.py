"""Importing this turns all eigenvectors to the other sign, which a LAPACK is as free to return."""

import torch

_eigh = torch.linalg.eigh


def eigh(matrix: torch.Tensor, UPLO: str = "L") -> torch.return_types.linalg_eigh:
    values, vectors = _eigh(matrix, UPLO)
    return torch.return_types.linalg_eigh((values, -vectors))


torch.linalg.eigh = eigh

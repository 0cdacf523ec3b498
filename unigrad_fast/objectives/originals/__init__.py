"""The original losses, in plain torch with autograd."""

from .asymmetric import BYOL, DirectPred, SimSiam
from .clustering import DINO, TWIST, SwAV
from .contrastive import MoCo, SimCLR
from .decorrelation import BarlowTwins, VICReg
from .original import ORIGINALS

__all__ = [
    "BYOL",
    "DINO",
    "ORIGINALS",
    "TWIST",
    "BarlowTwins",
    "DirectPred",
    "MoCo",
    "SimCLR",
    "SimSiam",
    "SwAV",
    "VICReg",
]

"""The original losses, in plain torch with autograd."""

from .asymmetric import BYOL, DirectPred, SimSiam
from .contrastive import MoCo, SimCLR
from .decorrelation import BarlowTwins, VICReg
from .original import ORIGINALS

__all__ = ["BYOL", "ORIGINALS", "BarlowTwins", "DirectPred", "MoCo", "SimCLR", "SimSiam", "VICReg"]

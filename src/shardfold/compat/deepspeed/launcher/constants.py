"""Names of what starts other hosts; ``shardfold run --launcher`` takes them."""

__all__ = [
    "IMPI_LAUNCHER",
    "MPICH_LAUNCHER",
    "MVAPICH_LAUNCHER",
    "MVAPICH_TMP_HOSTFILE",
    "OPENMPI_LAUNCHER",
    "PDSH_LAUNCHER",
    "PDSH_MAX_FAN_OUT",
    "SLURM_LAUNCHER",
]

PDSH_LAUNCHER, OPENMPI_LAUNCHER, MPICH_LAUNCHER, IMPI_LAUNCHER = "pdsh", "openmpi", "mpich", "impi"
SLURM_LAUNCHER, MVAPICH_LAUNCHER = "slurm", "mvapich"
PDSH_MAX_FAN_OUT = 1024
MVAPICH_TMP_HOSTFILE = "/tmp/deepspeed_mvapich_hostfile"  # DeepSpeed's; here each call makes a file of its own

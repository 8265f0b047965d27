"""Names of backends."""

__all__ = ["CCL_BACKEND", "GLOO_BACKEND", "HCCL_BACKEND", "MPI_BACKEND", "NCCL_BACKEND"]

CCL_BACKEND, GLOO_BACKEND, HCCL_BACKEND, MPI_BACKEND, NCCL_BACKEND = "ccl", "gloo", "hccl", "mpi", "nccl"

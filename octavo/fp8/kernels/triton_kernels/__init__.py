"""The Triton kernels and their launches, a file each: casts, GEMMs, grouped GEMMs, fused layers. They import triton, so
that nothing outside ``triton_backend`` imports them, and that only when a kernel runs."""

"""Cross-entropy and a penalty on logits in one sweep over the voxels: values and gradient.

``terms`` says what can be swept, ``fused`` is the differentiable function. ``cpu`` hands a sweep to
``loops``, or ``confidence_loops`` for the penalty on log-odds, which Numba compiles with
``vector_math``; ``cuda`` is the kernel for GPUs, in Triton, and ``confidence_kernel`` the other.
``bins`` is the differentiable function of sums of probabilities by bin, with ``bins_loops``.
"""

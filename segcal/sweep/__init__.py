"""Cross-entropy and a penalty on logits in one sweep, a single pass over the voxels.

A sweep computes values and gradient. ``terms`` says what can be swept, ``fused`` is the
differentiable function. On CPUs, ``cpu`` hands a sweep to ``loops``, or to ``confidence_loops`` for
the penalty on log-odds, which Numba compiles together with ``vector_math``. On GPUs, ``cuda`` and
``confidence_kernel`` are the two kernels, in Triton. ``bins`` is the differentiable function of
sums of probabilities by bin, with ``bins_loops``.
"""

"""The fused loss head on Hopper GPUs (sm_90), in bf16: one file a step of its work.

``loss_head.cu``  the GEMM and its epilogues          ``module``    compiles and launches it
``ptx.cuh``       the instructions it is made of
``rows``          work per row, in Triton             ``plan``      how much at a time
``call``          a call's rows, and its scratch      ``products``  what cuBLAS multiplies
``tile``          a tile of rows: its launches        ``gradient``  its coefficients, and dW
``head``          forward and backward
"""

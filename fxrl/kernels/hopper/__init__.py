"""The fused loss head on Hopper GPUs (sm_90), in bf16.

``loss_head.cu``  the GEMM and its epilogues      ``module``  compiles and launches it
``ptx.cuh``       the instructions it is made of
``head``          a call's tiles of rows, forward, backward, dW
``plan``          how much at a time              ``rows``    work per row, in Triton
"""

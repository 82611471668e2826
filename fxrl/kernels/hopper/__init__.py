"""GEMMs on Hopper GPUs (sm_90): the loss head's, fused, in bf16, and FP8's with an adapter's part.

``gemm.cuh``           what they share              ``module``   compiles and launches them
``loss_head.cu``       the head's epilogues         ``ptx.cuh``  the instructions they are made of
``scaled_product.cu``  a frozen Linear and its adapter           ``product``  calls it
``head``               a call's tiles of rows, forward, backward, dW
``plan``               how much at a time           ``rows``     work per row, in Triton
"""

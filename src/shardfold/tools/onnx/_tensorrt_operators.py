"""Which operators of ONNX NVIDIA TensorRT has, by its parser's published table. Nothing here was run on TensorRT."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["TENSORRT", "missing_operators"]

NAMES = """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool BatchNormalization BlackmanWindow
    Cast CastLike Ceil Celu Clip Concat Constant ConstantOfShape Conv ConvTranspose Cos Cosh CumSum DeformConv
    DepthToSpace DequantizeLinear Div Dropout Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU Gather
    GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GridSample
    GroupNormalization HammingWindow HannWindow HardSigmoid HardSwish Hardmax Identity If ImageScaler
    InstanceNormalization IsInf IsNaN LRN LSTM LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax Loop
    LpNormalization LpPool MatMul Max MaxPool Mean MeanVarianceNormalization Min Mish Mod Mul Neg NonMaxSuppression
    NonZero Not OneHot Or PRelu Pad ParametricSoftplus Pow QuantizeLinear RMSNormalization RNN RandomNormal
    RandomNormalLike RandomUniform RandomUniformLike Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp
    ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize ReverseSequence
    RotaryEmbedding RoiAlign Round STFT ScaledTanh Scan ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign Sin
    Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Swish Tan Tanh ThresholdedRelu
    Tile TopK Transpose Trilu Unsqueeze Upsample Where Xor
"""

TENSORRT = frozenset(NAMES.split())
"""Operators that TensorRT 10's parser reads, some of them in some dtypes or with constant inputs only."""


def missing_operators(operators: Iterable[str]) -> list[str]:
    """Those that the table does not have, in order."""
    return sorted(set(operators) - TENSORRT)

"""Models as ONNX: `shardfold ckpt export RUN out/ --to onnx`.

PyTorch's exporter makes the graph, ONNX Runtime runs and rounds it; from here are the names, the layers that are
repeated, the comparison with the source and the cost of few bits.

onnx_export          from a folder to a folder, which is there only once it says what its source does
onnx_session         a graph under ONNX Runtime: steps of a decoder, greedy texts
_compared            whether a graph computes what its source does
_few_bits            weights in 8 or 4 bits, by ONNX Runtime's quantizers
_layer_graph         a few layers exported, and their nodes repeated for the others
_onnx_source         what is exported: a model with its values, and how it is called
_scored_graph        bits per byte of a graph, by the measure of `shardfold eval`
_tensorrt_operators  which operators TensorRT's published table has
"""

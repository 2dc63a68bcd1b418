"""tmp"""
def names():
    import vllm
    if vllm.__version__.startswith("0.26"):
        from treewy.vllm_plugin.compat import v026
        return v026
    from treewy.vllm_plugin.compat import v032
    return v032

import nni

"""@nni.variable(nni.choice(16, 32), name=batch_size)"""
batch_size = 16
nni.report_final_result(batch_size)

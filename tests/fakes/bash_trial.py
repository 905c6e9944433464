"""A trial for machines without Python: a bash script that writes records in the format of nni_sdk. Its results depend only on the
parameter x.
"""

TRAIN_SH = """
x=$(sed -n 's/.*"x": \\([0-9.e-]*\\).*/\\1/p' "$NNI_SYS_DIR/parameter.cfg")
report() {
  local record
  record=$(printf '{"parameter_id": "%s", "trial_job_id": "%s", "type": "%s", "sequence": %s, "value": "%s"}' \\
    "$NNI_TRIAL_SEQ_ID" "$NNI_TRIAL_JOB_ID" "$1" "$2" "$3")
  printf 'ME%06d%s\\n' $((${#record} + 1)) "$record" >> "$NNI_SYS_DIR/.nni/metrics"
}
for step in 0 1 2; do report PERIODICAL "$step" "${step}${x#0}"; done
report FINAL 0 "$x"
"""

/**
 * The parts of the manager's HTTP API that the page reads. Times are milliseconds since the epoch.
 *
 * @typedef {{[name: string]: unknown}} Parameters
 *
 * @typedef {object} Row  A trial in lists; a changed trial is a new object.
 * @property {string} id
 * @property {number} seq
 * @property {string} state  the manager's state, such as CLOSING
 * @property {number} [stoppingSince]  when the stop in progress was requested
 * @property {string} status  NNI's state
 * @property {Parameters} parameters
 * @property {number | null} value  the final result, or the default number in a dict
 * @property {number | null} latest  the newest intermediate result
 * @property {number} count  number of intermediate results
 * @property {number | null} submit
 * @property {number | null} start
 * @property {number | null} end
 * @property {string | null} reason  why it ended
 * @property {number | null} exitCode
 * @property {string} message
 * @property {string} [why]  why it ended, on one line
 * @property {string} [warning]
 * @property {string[]} [tags]
 * @property {string} [note]  its first line
 * @property {number | null} attempt
 * @property {boolean} customized
 * @property {{[name: string]: number}} [metrics]  the numbers beside the default one in a result that is a dict
 * @property {true} [infeasible]  the result violates a constraint
 * @property {true} [cut]  long parameter values or some metrics are left out; the trial itself has all
 *
 * @typedef {object} UsageFigures
 * @property {number} cpuPercent
 * @property {number} rssBytes
 * @property {number} diskBytes
 * @property {{index: number, utilisationPercent: number, memoryUsedBytes: number}[]} gpus
 *
 * @typedef {UsageFigures & {attempt: number, task: string, timestamp: number}} UsageSample
 *
 * @typedef {{tags: string[], note: string}} Remarks  what people gave a trial or the experiment
 *
 * @typedef {{addTags?: string[], removeTags?: string[], note?: string}} RemarksChange
 *
 * @typedef {object} Trial  The details of one trial.
 * @property {string} id
 * @property {number} sequenceId
 * @property {string} state
 * @property {string} status
 * @property {string} [jobId]
 * @property {string} [logPath]
 * @property {string} [link]
 * @property {number} [submitTime]
 * @property {number} [startTime]
 * @property {number} [endTime]
 * @property {Parameters} parameters
 * @property {number | null} value
 * @property {number[]} [values]  with several objectives, the number of each
 * @property {string[]} [violates]  the constraints that the result violates
 * @property {{data: string}[]} [finalMetricData]
 * @property {string | null} reason
 * @property {number | null} exitCode
 * @property {string | null} how  the reason with the exit code or the signal
 * @property {string} why  why it ended, on one line
 * @property {number | null} [stoppingSince]
 * @property {string} message
 * @property {string} warning
 * @property {number | null} attempt
 * @property {number} retries
 * @property {number} preemptions
 * @property {?string} continues
 * @property {boolean} isCustomized
 * @property {string[]} tags
 * @property {string} note
 * @property {number} intermediateCount
 * @property {{peak: UsageFigures, latest: UsageFigures | null} | null} usage
 * @property {Provenance} [provenance]  only in the answer about one trial
 * @property {boolean} [hasCheckpoint]  only in the answer about one trial
 * @property {string | null} transport
 * @property {number | null} lastContactAgoS
 *
 * @typedef {object} CodeVersion
 * @property {number} since
 * @property {string | null} digest
 * @property {string | null} gitCommit
 * @property {boolean | null} isDirty
 *
 * @typedef {object} Provenance
 * @property {CodeVersion | null} code
 * @property {{attempt: number, task: string | null, host: string | null, node: string | null, python: string | null, packages: string | null}[]} attempts
 *
 * @typedef {object} Summary
 * @property {string} id
 * @property {string} name
 * @property {string} status
 * @property {string[]} errors
 * @property {string[]} problems
 * @property {{[trial: string]: string}} clusterMessages  what the cluster reports of trials that have not ended, of at most 100
 * @property {{[status: string]: number}} counts
 * @property {number} trialCount
 * @property {number | null} maxTrialNum
 * @property {number} trialConcurrency
 * @property {number} elapsedS
 * @property {number | null} maxExecDurationS
 * @property {string} optimizeMode  of the first objective
 * @property {{metric: string, mode: string}[]} objectives  at least one; without any in the experiment file, `default`
 * @property {string[]} constraints  such as "size_mb ≤ 50"
 * @property {{count: number, ids: string[]}} front  the best trials: with several objectives the Pareto front, in the order of
 *   the first; `ids` are some of many
 * @property {Trial | null} best
 * @property {Trial[]} top
 * @property {Trial[]} latestFailures
 * @property {Trial | null} latestWithoutResult
 * @property {number} keepers
 * @property {boolean} readOnly
 * @property {string[]} tags
 * @property {string} note
 * @property {number | null} startTime
 * @property {number | null} endTime
 *
 * @typedef {object} Changes
 * @property {string} version
 * @property {boolean} reset  true if `trials` are all trials
 * @property {true} [windowed]  there are too many trials for the page: `trials` is empty, and the page loads what it shows
 * @property {Summary} summary
 * @property {Row[]} trials
 *
 * @typedef {object} TrialWindow  A range of the matching trials.
 * @property {number} total
 * @property {number} matching
 * @property {number} offset
 * @property {number | null} place  the index of the trial that was asked for
 * @property {Row[]} trials
 *
 * @typedef {object} TrialSample
 * @property {number} total
 * @property {number} matching
 * @property {number} results  number of matching trials that have ended with a result
 * @property {string[]} parameters  names, of all trials
 * @property {string[]} metrics  names, of all trials
 * @property {boolean} hasTags  true once a trial has had a tag
 * @property {Row[]} trials  in the order of their numbers
 *
 * @typedef {object} Configuration
 * @property {string} id
 * @property {string} logDir
 * @property {string | null} description
 * @property {{name: string, classArgs?: unknown}} tuner
 * @property {{name: string} | null} assessor
 * @property {string} earlyStops  what the tuner learns from trials that the assessor stops; empty without one
 * @property {{source: string, value: number}[]} warmStart  the earlier results with whose parameters the search starts
 * @property {string} trainingService
 * @property {{command: string, codeDirectory: string, codeVersion: CodeVersion | null, gpuNumber: number | null, maxDurationS: number | null}} trial
 * @property {unknown} searchSpace
 * @property {string} text  the stored configuration as YAML
 * @property {string} version  of the manager
 *
 * @typedef {object} Importance  The share of each parameter, or why there is none.
 * @property {{name: string, value: number}[]} importances
 * @property {number} trials  number of trials with the metric
 * @property {string} why
 *
 * @typedef {object} Metric  One record; `data` is JSON text inside JSON.
 * @property {number} timestamp
 * @property {string} trialJobId
 * @property {string} type
 * @property {number} sequence
 * @property {string} data
 * @property {number} [place]  from 0, among all records of the trial; only in a report, which has evenly chosen ones
 *
 * @typedef {{size: number, from: number, text: string, next: number}} LogPiece
 *
 * @typedef {object} Attempt
 * @property {number} attempt
 * @property {{task: string, id: string, streams: {[stream: string]: number}}[]} tasks
 *
 * @typedef {object} Job
 * @property {string} jobId
 * @property {string[]} trialIds  the newest trials of the job
 * @property {number} [trialCount]
 * @property {number | null} [created]
 * @property {number | null} [ended]
 * @property {string} state
 * @property {string | null} transport
 * @property {number | null} lastContactAgoS
 * @property {{task: string, version: string, address?: string}[]} keepers
 * @property {string | null} [link]
 * @property {boolean} [hasLog]  the cluster keeps the logs of its tasks
 *
 * @typedef {object} Gpu  a GPU that the manager assigns to trials
 * @property {number} index
 * @property {string[]} jobIds
 * @property {string[]} trialIds
 * @property {boolean | null} hasOtherPrograms  null: unknown
 * @property {number | null} utilisationPercent
 * @property {number | null} memoryUsedBytes
 *
 * @typedef {object} KnownExperiment
 * @property {string} id
 * @property {string} [experimentName]
 * @property {string[]} [tags]
 * @property {string} [note]
 * @property {string} status
 * @property {string} [platform]
 * @property {number} [startTime]
 * @property {number} [endTime]
 * @property {number | null} [port]
 * @property {number | null} [viewPort]
 * @property {number} [trialCount]
 * @property {number} [succeededCount]
 * @property {number} [failedCount]
 * @property {number} [bestValue]
 * @property {number} [frontCount]  with several objectives, the number of trials on the Pareto front
 * @property {string} [url]
 * @property {string} [problem]
 * @property {boolean} [here]
 */

export {};

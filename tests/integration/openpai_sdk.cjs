// Every call of OpenPAI's JavaScript SDK that has a path on the server, against the address and with the token of the command line.
// One line of JSON for each: its name, and its result or the server's error.
const { PAIV2 } = require('@microsoft/openpai-js-sdk');

const [address, token, username, password] = process.argv.slice(2);
const client = new PAIV2.OpenPAIClient({ rest_server_uri: address, username, token, https: false });
const job = [username, 'done'];
const newJob = {
  protocolVersion: 2, name: 'made', type: 'job',
  prerequisites: [{ name: 'i', type: 'dockerimage', uri: 'ubuntu:22.04' }],
  taskRoles: {
    worker: { dockerImage: 'i', instances: 1, resourcePerInstance: { cpu: 1, memoryMB: 64, gpu: 0 }, commands: ['sleep 600'] },
  },
};
const calls = {
  'api.getClusterInfo': () => client.api.getClusterInfo(),
  'authn.basicLogin': () => client.authn.basicLogin(username, password, 3600),
  'authn.oidcLogin': () => client.authn.oidcLogin(),
  'authn.oidcLogout': () => client.authn.oidcLogout(),
  'token.getTokens': () => client.token.getTokens(),
  'token.createApplicationToken': () => client.token.createApplicationToken(),
  'token.deleteToken': async () => client.token.deleteToken((await client.token.createApplicationToken()).token),
  'user.getAllUser': () => client.user.getAllUser(),
  'user.createUser': () => client.user.createUser({ username: 'eve', email: '', virtualCluster: [], password: "eve's own", admin: false }),
  'user.getUser': () => client.user.getUser('eve'),
  'user.updateUser': () => client.user.updateUser({ username: 'eve', password: 'another one' }, true),
  'user.updateUserSelf': () => client.user.updateUserSelf({ username, oldPassword: password, newPassword: password }, true),
  'user.updateUserGroup': () => client.user.updateUserGroup('eve', 'default'),
  'user.deleteUserGroup': () => client.user.deleteUserGroup('eve', 'default'),
  'user.updateUserGrouplist': () => client.user.updateUserGrouplist('eve', ['default']),
  'user.deleteUser': () => client.user.deleteUser('eve'),
  'group.getAllGroup': () => client.group.getAllGroup(),
  'group.getGroup': () => client.group.getGroup('default'),
  'group.getGroupMembers': () => client.group.getGroupMembers('default'),
  'group.createGroup': () => client.group.createGroup({ groupname: 'other', description: '', externalName: '', extension: {} }),
  'group.updateGroup': () => client.group.updateGroup({ groupname: 'default', description: 'changed' }),
  'group.deleteGroup': () => client.group.deleteGroup('other'),
  'virtualCluster.listVirtualClusters': () => client.virtualCluster.listVirtualClusters(),
  'virtualCluster.getVirtualCluster': () => client.virtualCluster.getVirtualCluster('default'),
  'virtualCluster.getVirtualClusterSkuTypes': () => client.virtualCluster.getVirtualClusterSkuTypes('default'),
  'storage.getStorages': () => client.storage.getStorages(true),
  'storage.getStorage': () => client.storage.getStorage('team'),
  'job.listJobs': () => client.job.listJobs({ limit: 5 }),
  'job.createJob': () => client.job.createJob(newJob),
  'job.getJob': () => client.job.getJob(...job),
  'job.getJobConfig': () => client.job.getJobConfig(...job),
  'job.updateJobExecutionType': () => client.job.updateJobExecutionType(username, 'made', 'STOP'),
  'job.addTag': () => client.job.addTag(...job, 'mine'),
  'job.deleteTag': () => client.job.deleteTag(...job, 'mine'),
  'job.getTask': () => client.job.getTask(...job, 0, 'worker', 0),
  'job.getTaskLogs': () => client.job.getTaskLogs(...job, 0, 'worker', 0, 0, true),
  'job.listEvents': () => client.job.listEvents(...job, { type: 'Normal' }),
  'jobHistory.getJobAttemptsHealthz': () => client.jobHistory.getJobAttemptsHealthz(...job),
  'jobHistory.getJobAttempts': () => client.jobHistory.getJobAttempts(...job),
  'jobHistory.getJobAttempt': () => client.jobHistory.getJobAttempt(...job, 0),
  'kubernetes.getK8sNodes': () => client.kubernetes.getK8sNodes(),
  'kubernetes.getK8sPods': () => client.kubernetes.getK8sPods(),
  'authn.basicLogout': () => client.authn.basicLogout(),
};

(async () => {
  for (const [name, call] of Object.entries(calls)) {
    const outcome = await call().then(result => ({ result: result ?? null }), error => ({ error: error.data ?? String(error) }));
    console.log(JSON.stringify({ name, ...outcome }));
  }
})();

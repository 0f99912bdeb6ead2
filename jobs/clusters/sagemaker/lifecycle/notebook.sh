#!/bin/bash
# At each start of a notebook instance, as root, within five minutes: a cron job that stops it when no kernel has worked
# for a while, and, in the background, the workshop's set-up. It is also the OnStart of templates/notebook.yaml; a test
# keeps the two equal. What lies below SageMaker/ outlives a stop, so the set-up takes ten minutes only once. A kernel's
# registration does not, so it is made at each start.
set -eu
REPOSITORY=https://example.org/workshop.git
IDLE_MINUTES=60
cat > /usr/local/bin/stop-when-idle <<'PROGRAM'
#!/usr/bin/python3
import datetime, json, ssl, subprocess, sys, urllib.request
nobody = ssl._create_unverified_context()  # the certificate is for another name than localhost
with urllib.request.urlopen("https://localhost:8443/api/status", context=nobody) as answer:
    last = json.load(answer)["last_activity"]
then = datetime.datetime.fromisoformat(last.replace("Z", "+00:00"))
idle = datetime.datetime.now(datetime.timezone.utc) - then
if idle > datetime.timedelta(minutes=float(sys.argv[1])):
    with open("/opt/ml/metadata/resource-metadata.json") as file:
        own = json.load(file)  # its name, and its region within the ARN
    stop = ["aws", "sagemaker", "stop-notebook-instance", "--region", own["ResourceArn"].split(":")[3]]
    subprocess.run([*stop, "--notebook-instance-name", own["ResourceName"]], check=True)
PROGRAM
chmod +x /usr/local/bin/stop-when-idle
echo "*/5 * * * * root /usr/local/bin/stop-when-idle $IDLE_MINUTES" > /etc/cron.d/stop-when-idle
dnf install -y -q gcc-c++ git iproute iproute-tc make python3.11 python3.11-devel
cat > /usr/local/bin/set-workshop-up <<'PROGRAM'
#!/bin/bash
set -eu
cd /home/ec2-user/SageMaker
test -d workshop || git clone "$1" workshop
cd workshop
export WORKSHOP_CACHE=/home/ec2-user/SageMaker/.workshop-cache
make setup PYTHON=python3.11
.venv/bin/workshop copy-lessons my_lessons
.venv/bin/python -m ipykernel install --user --name workshop --display-name Workshop \
    --env PATH "$PWD/.venv/bin:$PATH" --env WORKSHOP_CACHE "$WORKSHOP_CACHE"
echo "The workshop is set up: open a lesson in workshop/my_lessons and choose the kernel Workshop."
PROGRAM
chmod +x /usr/local/bin/set-workshop-up
log=/home/ec2-user/SageMaker/workshop-set-up.log
nohup sudo -u ec2-user --login /usr/local/bin/set-workshop-up "$REPOSITORY" > $log 2>&1 &

# Image for NVIDIA GPUs; docs/launching.md has the commands. CUDA's libraries are Python packages, so the host needs only
# a driver and NVIDIA's container toolkit. EXTRAS are those of JAX: cuda12 or cuda13, and k8s for Kubernetes.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim
ARG PYTHON
ARG EXTRAS=cuda12,k8s

WORKDIR /digen_jax
# First, so that a change of the code installs no package again.
COPY requirements*.txt ./
COPY constraints constraints
# hadolint ignore=DL3013
RUN pip install --no-cache-dir -c "constraints/${PYTHON}.txt" -r requirements.txt -r requirements-reward.txt \
    -r requirements-ray.txt -r requirements-video.txt "jax[${EXTRAS}]"
COPY . .
RUN pip install --no-cache-dir --no-deps -e .
CMD ["python", "launch/train.py", "--help"]

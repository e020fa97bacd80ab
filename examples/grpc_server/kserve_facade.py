"""The Open Inference Protocol (KServe v2), as far as probes and metadata clients need it."""

import grpc
import open_inference_pb2 as oip
import open_inference_pb2_grpc as oip_rpc
from guard import Refusal
from service import SERVICE, Generation

import jaxserve

KSERVE_SERVICE = oip.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
VERSION = "1"  # of the one model


class KServeFacade(oip_rpc.GRPCInferenceServiceServicer):
    """Says of `generation` what the standard's clients ask. Tensors are not served."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def ServerLive(self, request, context) -> oip.ServerLiveResponse:
        return oip.ServerLiveResponse(live=self._generation.state != "dead")

    async def ServerReady(self, request, context) -> oip.ServerReadyResponse:
        return oip.ServerReadyResponse(ready=self._generation.state == "serving")

    async def ModelReady(self, request: oip.ModelReadyRequest, context) -> oip.ModelReadyResponse:
        self._check_model(request)
        return oip.ModelReadyResponse(ready=self._generation.state == "serving")

    async def ServerMetadata(self, request, context) -> oip.ServerMetadataResponse:
        return oip.ServerMetadataResponse(name="jaxserve", version=jaxserve.__version__)

    async def ModelMetadata(self, request: oip.ModelMetadataRequest, context) -> oip.ModelMetadataResponse:
        self._check_model(request)
        return oip.ModelMetadataResponse(name=self._generation.model_name, versions=[VERSION], platform="jaxserve")

    async def ModelInfer(self, request, context) -> oip.ModelInferResponse:
        raise NotImplementedError(f"ModelInfer serves tensors, not text: call {SERVICE}/Generate")

    def _check_model(self, request: oip.ModelReadyRequest | oip.ModelMetadataRequest) -> None:
        served = self._generation.model_name
        if request.name != served or request.version not in ("", VERSION):
            asked = f"{request.name!r}" + (f" version {request.version!r}" if request.version else "")
            raise Refusal(grpc.StatusCode.NOT_FOUND, f"model {asked} is not served; {served!r} version {VERSION!r} is")

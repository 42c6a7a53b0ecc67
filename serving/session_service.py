"""The methods of swiftjax.v1.SessionService: sessions are opened, changed and kept in files here.

Turns are calls of GenerationService. Translates only; `session_desk.py` finds sessions and files.
"""

from swiftjax.engine.request import RequestOptions
from swiftjax.errors import InvalidRequestError
from swiftjax.serving import messages
from swiftjax.serving.caller import current_caller
from swiftjax.serving.interceptor import Context
from swiftjax.serving.options import read_streaming
from swiftjax.serving.proto import swiftjax_pb2 as pb
from swiftjax.serving.proto import swiftjax_pb2_grpc as pb_grpc
from swiftjax.serving.served import Served
from swiftjax.serving.session_desk import (
    delete_session,
    find_session,
    restore_session,
    save_session,
)


class SessionService(pb_grpc.SessionServiceServicer):
    """Sessions over gRPC. `served` is set before the gate lets the first call in."""

    served: Served

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: Context
    ) -> pb.OpenSessionResponse:
        """Open a session without text."""
        session = self.served.engine.sessions.open(
            streaming=read_streaming(request.streaming) if request.HasField("streaming") else None,
            seed=request.seed if request.HasField("seed") else None,
            options=RequestOptions(cache_salt=request.cache_salt),
            owner=current_caller().name,
        )
        return pb.OpenSessionResponse(session=session.session_id)

    async def AppendSession(
        self, request: pb.AppendSessionRequest, context: Context
    ) -> pb.AppendSessionResponse:
        """Add to the text of a session."""
        session = find_session(self.served, request.session, current_caller().name)
        content = messages.read_content(request, session.text.longest)
        if content is None:
            raise InvalidRequestError("nothing to append: set text, chat or token_ids")
        await session.append(content, turn_id=request.turn_id)
        return pb.AppendSessionResponse(num_tokens=len(session))

    async def ForkSession(
        self, request: pb.ForkSessionRequest, context: Context
    ) -> pb.ForkSessionResponse:
        """Open another session with the same text."""
        session = find_session(self.served, request.session, current_caller().name)
        fork = await session.fork()
        return pb.ForkSessionResponse(session=fork.session_id)

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: Context
    ) -> pb.CloseSessionResponse:
        """Close a session."""
        find_session(self.served, request.session, current_caller().name).close()
        return pb.CloseSessionResponse()

    async def SaveSession(
        self, request: pb.SaveSessionRequest, context: Context
    ) -> pb.SaveSessionResponse:
        """Write a session to a file."""
        await save_session(self.served, request.session, request.name, current_caller().name)
        return pb.SaveSessionResponse()

    async def RestoreSession(
        self, request: pb.RestoreSessionRequest, context: Context
    ) -> pb.RestoreSessionResponse:
        """Open a session from a file."""
        session = await restore_session(self.served, request.name, current_caller().name)
        return pb.RestoreSessionResponse(session=session.session_id, num_tokens=len(session))

    async def DeleteSavedSession(
        self, request: pb.DeleteSavedSessionRequest, context: Context
    ) -> pb.DeleteSavedSessionResponse:
        """Delete a file."""
        await delete_session(self.served, request.name, current_caller().name)
        return pb.DeleteSavedSessionResponse()

-- Writing from any language, in the transaction of the business rows:
--   exec postroom_enqueue @topic = 'orders', @type = 'order.placed', @text = N'{"total":12}', @options = N'{"key":"o-17"}', @id = @id output
-- The payload is given as bytes (@payload) or as text (@text), which becomes UTF-8. Options: key, routing_key, content_type, headers, tenant_id,
-- aggregate_type, aggregate_id, aggregate_version, delay_seconds.
create procedure postroom_enqueue
    @topic   nvarchar(256),
    @type    nvarchar(256),
    @payload varbinary(max) = null,
    @text    nvarchar(max) = null,
    @options nvarchar(max) = null,
    @id      uniqueidentifier = null output
as
begin
    set nocount on;
    declare @problem nvarchar(2048) = null;
    if @@trancount = 0
        set @problem = N'postroom_enqueue: there is no transaction; begin the one that writes the business rows first';
    if (@payload is null and @text is null) or (@payload is not null and @text is not null)
        set @problem = N'postroom_enqueue: give the payload as @payload or as @text';
    if @options is not null and not ({object @options})
        set @problem = N'postroom_enqueue: the options must be a JSON object';
    if @problem is null and @options is not null
        select top (1) @problem = case
                when o.[key] not in (N'key', N'routing_key', N'content_type', N'headers', N'tenant_id', N'aggregate_type', N'aggregate_id',
                                     N'aggregate_version', N'delay_seconds') or o.[key] like N'% ' then concat(N'postroom_enqueue: there is no option ', left(o.[key], 64))
                else concat(N'postroom_enqueue: the option ', o.[key], N' cannot be of this type of JSON') end
          from openjson(@options) o
         where o.[key] not in (N'key', N'routing_key', N'content_type', N'headers', N'tenant_id', N'aggregate_type', N'aggregate_id',
                                              N'aggregate_version', N'delay_seconds')
            or o.[key] like N'% '
            or (o.[type] <> 0 and o.[type] <> case o.[key] when N'headers' then 5 when N'aggregate_version' then 2 when N'delay_seconds' then 2 else 1 end);
    if @problem is null and exists (select 1 from openjson(coalesce(json_query(@options, N'$.headers'), N'{}')) h where h.[type] <> 1)
        set @problem = N'postroom_enqueue: the values of headers must be text';
    if @problem is not null
        throw 50001, @problem, 1;
    declare @written table (id uniqueidentifier not null);
    insert into postroom_outbox (id, topic, type, payload, [key], routing_key, content_type, headers, tenant_id, aggregate_type, aggregate_id,
                                 aggregate_version, visible_at)
    output inserted.id into @written (id)
    select coalesce(@id, {new_id}), @topic, @type,
           coalesce(@payload, convert(varbinary(max), convert(varchar(max), @text collate {utf8}))),
           o.[key], o.routing_key, coalesce(o.content_type, N'application/octet-stream'), o.headers, o.tenant_id, o.aggregate_type, o.aggregate_id,
           o.aggregate_version,
           case when o.delay_seconds > 0 then
               dateadd(millisecond, convert(bigint, o.delay_seconds * 1000) % 1000, dateadd(second, convert(bigint, o.delay_seconds), sysutcdatetime())) end
      from openjson(coalesce(@options, N'{}')) with (
               [key] nvarchar(max) '$.key', routing_key nvarchar(max) '$.routing_key', content_type nvarchar(max) '$.content_type',
               headers nvarchar(max) '$.headers' as json, tenant_id nvarchar(max) '$.tenant_id', aggregate_type nvarchar(max) '$.aggregate_type',
               aggregate_id nvarchar(max) '$.aggregate_id', aggregate_version bigint '$.aggregate_version', delay_seconds decimal(18, 3) '$.delay_seconds') o;
    set @id = (select w.id from @written w);
end
